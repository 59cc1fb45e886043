"""Who sits where: scale units onto the ranks of a generation."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShape:
    """The processes of one scale unit: `expert` HDP ranks of `tensor` x `pipeline` each."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def num_workers(self) -> int:
        """Worker processes in one unit."""
        return self.tensor * self.pipeline * self.expert


def rank_order(units: Sequence[Sequence[int]], shape: UnitShape) -> tuple[int, ...]:
    """The worker of every rank, in Megatron's order: tensor fastest, then HDP, then pipeline.

    Unit i holds the HDP ranks [i * expert, (i + 1) * expert); its workers come in the same
    order. O(workers).

    Args:
        units: [U][W] worker ids of each unit.
        shape: how a unit's W workers divide.
    """
    per_stage = shape.tensor * shape.expert
    return tuple(
        worker
        for stage in range(shape.pipeline)
        for unit in units
        for worker in unit[stage * per_stage : (stage + 1) * per_stage]
    )
