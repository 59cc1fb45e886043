"""Forms generations: the one path by which a pool starts, resumes, grows, shrinks and recovers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra_ray.driver.crew import Crew
from hydra_ray.driver.placement import UnitShape, rank_order
from planner.pool import PoolShape
from workers.protocol import Membership


class WorkersLostError(Exception):
    """Workers were lost during a call; a signal inside the driver, never shown to a user."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"worker {w}: {cause}" for w, cause in lost.items()))
        self.lost = dict(lost)


class StateLostError(Exception):
    """The workers hold no applied step whole; a signal inside the driver, never shown to a user.

    All have forgotten their parts: in the next generation they hold nothing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where workers meet, and how patient they are.

    Args:
        host, port: the store, which outlives every worker.
        join_timeout_s: limit of the meeting, from which nobody can be freed.
        collective_timeout_s: limit of a collective; long, since `abort` frees who hangs in one.
    """

    host: str
    port: int
    join_timeout_s: float = 20.0
    collective_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A standing generation: its units, its workers by rank, and the last step all of them hold."""

    number: int
    units: tuple[int, ...]
    workers: tuple[int, ...]
    pool: PoolShape
    applied: int


def memberships(
    workers: Sequence[int], number: int, num_ranks: int, rendezvous: Rendezvous
) -> dict[int, Membership]:
    """Each worker's place in generation `number`; `workers` are in rank order."""
    return {
        worker: Membership(
            generation=number,
            rank=rank,
            world_size=len(workers),
            num_ranks=num_ranks,
            store_host=rendezvous.host,
            store_port=rendezvous.port,
            timeout_s=rendezvous.collective_timeout_s,
            join_timeout_s=rendezvous.join_timeout_s,
        )
        for rank, worker in enumerate(workers)
    }


def dissolve(crew: Crew, generation: Generation, *, timeout_s: float) -> None:
    """Let all workers of a standing generation leave it, those that go for good too.

    A collective where the optimizer is sharded: each keeps the whole state, gathered from all.

    Raises:
        WorkersLostError: a worker was lost on the way.
    """
    left = crew.call(generation.workers, "leave", lambda _: (), timeout_s=timeout_s)
    if not left.complete:
        raise WorkersLostError(left.lost)


def form(
    crew: Crew,
    number: int,
    units: tuple[int, ...],
    *,
    pool: PoolShape,
    shape: UnitShape,
    rendezvous: Rendezvous,
    timeout_s: float,
) -> Generation:
    """Join all workers of `units` into generation `number`, in step with one another.

    The furthest step that they hold whole is the truth: whoever is behind (a survivor that a
    failure stopped before its optimizer, or a newcomer) copies the state of workers that have it.

    Raises:
        WorkersLostError: a worker was lost on the way; nothing of the generation stands.
        StateLostError: steps were applied, and none is whole; nothing of the generation stands.
    """
    workers = rank_order([crew.workers_of(unit) for unit in units], shape)
    places = memberships(workers, number, pool.num_ranks, rendezvous)
    joined = crew.call(workers, "join", lambda w: (places[w], pool), timeout_s=timeout_s)
    if not joined.complete:
        raise WorkersLostError(joined.lost)
    applied = max(joined.results.values())
    if min(joined.results.values()) < applied:
        synced = crew.call(workers, "sync_state", lambda _: (), timeout_s=timeout_s)
        if not synced.complete:
            raise WorkersLostError(synced.lost)
        applied = min(synced.results.values())
        if applied == 0:
            raise StateLostError
    return Generation(number=number, units=units, workers=workers, pool=pool, applied=applied)
