"""Finds sequences that kill their workers: the same step failing twice where they are held."""

from collections.abc import Container, Iterable

from hydra_ray.driver.errors import SuspectSequencesError
from hydra_ray.driver.generation import Generation
from hydra_ray.driver.placement import UnitShape
from hydra_ray.driver.preparation import PreparedStep
from planner.plan import Plan
from planner.pool import IntArray


def sequences_on(plan: Plan, sequence_ids: IntArray, ranks: Iterable[int]) -> frozenset[int]:
    """Ids of the sequences that any of these HDP ranks holds a part of. O(ranks x groups + N)."""
    held: set[int] = set()
    for rank in ranks:
        ends = plan.group_start + plan.group_size
        for group in ((plan.group_start <= rank) & (rank < ends)).nonzero()[0]:
            held.update(sequence_ids[plan.group_members(int(group))].tolist())
    return frozenset(held)


def held_by(
    generation: Generation, prepared: PreparedStep, lost: Container[int], shape: UnitShape
) -> frozenset[int]:
    """Ids of the sequences that lost workers held in this step."""
    places = [place for place, worker in enumerate(generation.workers) if worker in lost]
    ranks = {place // shape.tensor % generation.pool.num_ranks for place in places}
    return sequences_on(prepared.plan, prepared.batch.sequence_ids, ranks)


class Suspects:
    """Remembers who was held by the workers whose processes failed in the step being tried."""

    def __init__(self) -> None:
        self._step = 0
        self._ids: frozenset[int] = frozenset()

    def blame(self, step: int, ids: frozenset[int]) -> None:
        """A try of `step` was lost, on workers that held `ids`.

        Raises:
            SuspectSequencesError: some of them were held by lost workers in the try before, too.
        """
        if step != self._step:
            self._step, self._ids = step, ids
            return
        self._ids &= ids
        if self._ids:
            raise SuspectSequencesError(
                f"step {step} lost its workers twice while they held the same sequences",
                value=f"sequence ids {sorted(self._ids)}",
                remedy="Look at these sequences and at the workers' memory; then leave them out "
                "of the corpus, or lower token_budget, and continue with --resume.",
            )
        self._ids = ids
