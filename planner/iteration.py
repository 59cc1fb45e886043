"""How long one iteration of a plan takes, in one definition that everything shares.

Megatron's 1F1B runs the M microbatches of a step one after the other behind p pipeline stages of
v chunks each, and waits (p - 1) / v microbatches more to fill and drain. With t_m the seconds of
microbatch m and t0 its fixed cost:

    iteration = sum over m of (t_m + t0)  +  (p - 1) / v * (t0 + max over m of t_m)

t_m is the load of the heaviest rank among those that wait for each other (`Coupling`).
"""

from typing import Literal

import numpy as np

from planner.cost import CostModel, CostTable, FloatArray
from planner.plan import Plan
from planner.pool import PoolShape

# Who waits for whom within a microbatch: the whole pool, or only blocks of so many HDP ranks
# (the ranks that share one set of experts).
Coupling = Literal["pool"] | int


def iteration_s(plan: Plan, cost: CostModel, coupling: Coupling = "pool") -> float:
    """Predicted seconds of one iteration. O(N + MBs x G).

    With blocks, each block adds up its own microbatches and the slowest block ends the
    iteration; the bubble is charged with the heaviest microbatch of the pool, since groups wider
    than a block tie the blocks' pipelines together. So blocks never take longer than the pool.
    """
    if plan.num_microbatches == 0:
        return 0.0
    table = cost.table(plan.pool)
    loads = rank_loads_s(plan, table)
    busy = float(block_heights_s(loads, coupling).sum(axis=1).max())
    return busy + overhead_s(plan.pool, plan.num_microbatches, float(loads.max()), table.fixed_s)


def overhead_s(pool: PoolShape, num_microbatches: int, heaviest_s: float, fixed_s: float) -> float:
    """What an iteration takes beyond its microbatches' loads: their fixed cost and the bubble."""
    return num_microbatches * fixed_s + bubble_weight(pool) * (fixed_s + heaviest_s)


def bubble_weight(pool: PoolShape) -> float:
    """(p - 1) / v: how many microbatches long the pipeline takes to fill and drain."""
    return (pool.stages - 1) / pool.chunks


def group_loads_s(plan: Plan, table: CostTable) -> FloatArray:
    """[K] seconds of work on each rank of each group. O(N)."""
    members_each = np.diff(plan.group_offsets)
    group_of = np.repeat(np.arange(plan.num_groups), members_each)
    degree_index = np.searchsorted(table.degrees, plan.group_size)
    seconds = table.sequence_s(plan.lengths[plan.members], degree_index[group_of])
    loads = np.bincount(group_of, weights=seconds, minlength=plan.num_groups)
    return loads.astype(np.float64, copy=False)  # an empty bincount is of whole numbers


def rank_loads_s(plan: Plan, table: CostTable) -> FloatArray:
    """[MBs, G] seconds of work of every rank in every microbatch; idle ranks have none."""
    num_ranks = plan.pool.num_ranks
    first = plan.group_microbatch * num_ranks + plan.group_start
    # Ranks of one group are neighbours: mark where a group's load begins and ends, then add up
    # group numbers rather than loads, so that no rounding is carried along.
    marks = np.zeros(plan.num_microbatches * num_ranks + 1, dtype=np.int64)
    numbers = np.arange(1, plan.num_groups + 1)
    np.add.at(marks, first, numbers)
    np.add.at(marks, first + plan.group_size, -numbers)
    owner = np.cumsum(marks[:-1])
    loads = np.concatenate(([0.0], group_loads_s(plan, table)))
    return loads[owner].reshape(plan.num_microbatches, num_ranks)


def block_heights_s(loads: FloatArray, coupling: Coupling) -> FloatArray:
    """[blocks, MBs] the heaviest load of each block in each microbatch; `loads` is [MBs, G]."""
    num_ranks = loads.shape[1]
    block = num_ranks if coupling == "pool" else coupling
    heights: FloatArray = np.maximum.reduceat(loads, np.arange(0, num_ranks, block), axis=1)
    return heights.T
