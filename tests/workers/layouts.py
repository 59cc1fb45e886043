"""Plans laid out by hand, for what planners seldom do: every layout in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.plan import Plan
from planner.pool import PoolShape
from planner.validate import validate


@dataclass(frozen=True)
class Group:
    """A CP group of one microbatch: HDP ranks from `start`, and the lengths it packs."""

    start: int
    size: int
    ulysses: int
    lengths: Sequence[int]


def plan_of(microbatches: Sequence[Sequence[Group]], pool: PoolShape) -> Plan:
    """The plan with these groups; ranks in no group are idle."""
    groups = [(index, group) for index, mb in enumerate(microbatches) for group in mb]
    lengths = [length for _, group in groups for length in group.lengths]
    plan = Plan(
        planner="by hand",
        pool=pool,
        num_microbatches=len(microbatches),
        lengths=np.array(lengths),
        group_microbatch=np.array([index for index, _ in groups]),
        group_start=np.array([group.start for _, group in groups]),
        group_size=np.array([group.size for _, group in groups]),
        group_ulysses=np.array([group.ulysses for _, group in groups]),
        group_offsets=np.cumsum([0, *(len(group.lengths) for _, group in groups)]),
        members=np.arange(len(lengths)),
        target_s=0.0,
    )
    validate(plan)
    return plan


# Four microbatches whose layouts all differ; a sequence of one token has no label at all.
POOL_OF_4 = [
    [Group(0, 4, 2, [50, 30])],
    [Group(0, 2, 2, [40]), Group(2, 2, 1, [20, 13])],
    [Group(0, 2, 1, [33]), Group(2, 1, 1, [17]), Group(3, 1, 1, [9, 5])],
    [Group(0, 1, 1, [12]), Group(1, 1, 1, [7, 6]), Group(2, 1, 1, [24]), Group(3, 1, 1, [1])],
]
# Idle ranks, at the end of the pool and in the middle of it.
POOL_OF_4_IDLE = [
    [Group(0, 4, 4, [64])],
    [Group(0, 1, 1, [11]), Group(2, 2, 2, [31])],
    [Group(0, 2, 1, [23, 2]), Group(2, 1, 1, [19])],
    [Group(2, 1, 1, [3])],
]
POOL_OF_3 = [
    [Group(0, 3, 1, [50, 7])],
    [Group(0, 2, 2, [33]), Group(2, 1, 1, [12])],
    [Group(0, 1, 1, [9]), Group(1, 1, 1, [1]), Group(2, 1, 1, [6, 5])],
    [Group(0, 1, 1, [8]), Group(2, 1, 1, [14])],
]
POOL_OF_6 = [
    [Group(0, 6, 2, [60])],
    [Group(0, 4, 4, [31, 8]), Group(4, 2, 1, [22])],
    [Group(0, 2, 2, [16]), Group(2, 2, 1, [21]), Group(4, 1, 1, [7]), Group(5, 1, 1, [5, 3])],
    [Group(0, 1, 1, [4]), Group(2, 2, 2, [18]), Group(5, 1, 1, [1, 2])],
]
