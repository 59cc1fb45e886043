"""What the kernels of hydra-opt are told: sorted lengths, costs, the pool, as plain arrays."""

from typing import NamedTuple

import numpy as np

from planner.cost import CostTable, FloatArray
from planner.iteration import bubble_weight
from planner.opt.compiled import kernel
from planner.pool import IntArray, PoolShape

# A sequence shorter than a quarter of the budget is "short": one of many that fill a rank, never
# cut, and in the estimates a fluid. An eighth gives the same plans, more slowly; a half worse ones.
SHORT_SHARE = 4
# Where there are no more sequences than so many a rank, none is short.
FEW_A_RANK = 8
# A sequence joins a wider group only if the ranks together work no longer than so many times what
# they would at its own degree.
JOIN_WASTE = 1.35
# Short sequences join groups of degree k if they are this share of the budget times k (128 tokens
# a rank of 8192): padding would waste the rest. Only a matter of speed.
THINNEST_SHARE = 64

# Rows of `Task.costs`; all-to-all is part of the linear cost.
QUADRATIC, LINEAR, RING, LATENCY = range(4)


class Task(NamedTuple):
    """One batch on one pool.

    Args:
        lengths: [N] tokens, longest first.
        num_long: the first so many are long, the rest short.
        work_s: seconds of all sequences at degree 1.
        short_s, short_tokens: seconds and padded tokens of all short ones at degree 1.
        degrees: [D] legal CP degrees, ascending; sequences name a degree by its index.
        costs: [4, D] the coefficients of `CostTable`.
        fixed_s: t0 of a microbatch.
        pad_unit, budget, num_ranks: of the pool.
        join_waste: JOIN_WASTE.
        least_joining: tokens of the least short sequence that may join a group.
        num_joinable: degrees, from the least, whose groups short sequences may join.
        bubble: (p - 1) / v.
        step: legal MB counts are its multiples.
        fewest: the least legal MB count that holds the tokens.
    """

    lengths: IntArray
    num_long: int
    work_s: float
    short_s: float
    short_tokens: int
    degrees: IntArray
    costs: FloatArray
    fixed_s: float
    pad_unit: int
    budget: int
    num_ranks: int
    join_waste: float
    least_joining: int
    num_joinable: int
    bubble: float
    step: int
    fewest: int


def make_task(longest_first: IntArray, pool: PoolShape, table: CostTable) -> Task:
    """The task of a batch whose lengths are sorted; `with_totals` fills in its sums. O(D)."""
    few = len(longest_first) <= FEW_A_RANK * pool.num_ranks
    short_from = 0 if few else pool.token_budget // SHORT_SHARE
    thinnest = max(1, pool.token_budget // THINNEST_SHARE)
    num_short = int(np.searchsorted(longest_first[::-1], short_from))
    linear_s = table.linear_s + table.alltoall_s
    return Task(
        lengths=longest_first,
        num_long=len(longest_first) - num_short,
        work_s=0.0,
        short_s=0.0,
        short_tokens=0,
        degrees=table.degrees,
        costs=np.stack((table.quadratic_s, linear_s, table.ring_s, table.latency_s)),
        fixed_s=table.fixed_s,
        pad_unit=pool.pad_unit,
        budget=pool.token_budget,
        num_ranks=pool.num_ranks,
        join_waste=JOIN_WASTE,
        least_joining=2 * thinnest,
        num_joinable=int((2 * thinnest * table.degrees <= pool.token_budget // SHORT_SHARE).sum()),
        bubble=bubble_weight(pool),
        step=pool.legal_num_microbatches(1),
        fewest=0,
    )


@kernel
def on_rank(
    length: int, at: int, costs: FloatArray, degrees: IntArray, pad_unit: int
) -> tuple[float, int]:
    """Seconds c(s, k) and padded tokens of a sequence on each rank, k the degree of index `at`.

    The formula of `CostTable.sequence_s`.
    """
    shards = (length + pad_unit * degrees[at] - 1) // (pad_unit * degrees[at])
    padded = shards * pad_unit * degrees[at]
    attention = costs[QUADRATIC, at] * length * length
    exposed_ring = max(0.0, costs[RING, at] * padded - attention)
    seconds = attention + costs[LINEAR, at] * padded + exposed_ring + costs[LATENCY, at]
    return seconds, shards * pad_unit


@kernel
def least_s(length: int, at: int, costs: FloatArray) -> float:
    """What c(s, k) is at least: no padding, the ring hidden. Spares `on_rank` its division."""
    seconds: float = (costs[QUADRATIC, at] * length + costs[LINEAR, at]) * length
    return seconds


@kernel
def with_totals(task: Task) -> Task:
    """The task with the sums over its short sequences and its fewest MBs filled in. O(N)."""
    lengths, costs, degrees, pad_unit = task.lengths, task.costs, task.degrees, task.pad_unit
    short_s, short_tokens, long_s, long_tokens = 0.0, 0, 0.0, 0
    for place in range(task.num_long):
        seconds, tokens = on_rank(lengths[place], 0, costs, degrees, pad_unit)
        long_s += seconds
        long_tokens += tokens
    for place in range(task.num_long, len(lengths)):
        seconds, tokens = on_rank(lengths[place], 0, costs, degrees, pad_unit)
        short_s += seconds
        short_tokens += tokens
    held = task.num_ranks * task.budget * task.step
    fewest = max(1, (long_tokens + short_tokens + held - 1) // held) * task.step
    return Task(
        lengths,
        task.num_long,
        long_s + short_s,
        short_s,
        short_tokens,
        degrees,
        costs,
        task.fixed_s,
        pad_unit,
        task.budget,
        task.num_ranks,
        task.join_waste,
        task.least_joining,
        task.num_joinable,
        task.bubble,
        task.step,
        fewest,
    )


def sample(task: Task, every: int) -> Task:
    """Every so many-th sequence on a pool as many times smaller; sums still to be filled in."""
    lengths = task.lengths[every // 2 :: every].copy()
    num_ranks = task.num_ranks // every
    num_degrees = int((task.degrees <= num_ranks).sum())
    return task._replace(
        lengths=lengths,
        num_long=len(range(every // 2, task.num_long, every)),
        degrees=task.degrees[:num_degrees].copy(),
        costs=task.costs[:, :num_degrees].copy(),
        num_ranks=num_ranks,
        num_joinable=min(task.num_joinable, num_degrees),
    )
