"""The exact optimum of tiny inputs, by trying every plan: the yardstick of the planners' tests."""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.cost import CostModel, FloatArray
from planner.iteration import bubble_weight
from planner.pool import IntArray, PoolShape


def exact_iteration_s(
    lengths: IntArray, pool: PoolShape, cost: CostModel, *, at_most_s: float = np.inf
) -> float:
    """The least iteration (`iteration_s`, whole pool) of any plan with the pool's degrees.

    Sequences are placed longest first, each into every open group and into every new group that
    free ranks allow; a branch ends when it cannot become better than the best plan so far.
    Exponential in N: about a second for 8 sequences on 4 ranks.

    Args:
        lengths: [N] tokens of each sequence.
        pool: the pool.
        cost: the cost model.
        at_most_s: the time of a known plan, or infinity. Returned if nothing is better.
    """
    table = cost.table(pool)
    longest_first = -np.sort(-np.asarray(lengths, dtype=np.int64))[:, None]
    unit = table.degrees * pool.pad_unit
    tokens = -(-longest_first // unit) * pool.pad_unit
    seconds = table.sequence_s(longest_first, np.arange(len(unit))[None, :])
    seconds[tokens > pool.token_budget] = np.inf
    work = (seconds * table.degrees).min(axis=1)
    work_after = np.concatenate((np.cumsum(work[::-1])[::-1], [0.0]))
    step = pool.legal_num_microbatches(1)
    # More microbatches than sequences leave one empty, which only costs.
    most = pool.legal_num_microbatches(len(longest_first))
    best = at_most_s if len(longest_first) else 0.0
    for num_microbatches in range(step, most + 1, step):
        fixed = (num_microbatches + bubble_weight(pool)) * table.fixed_s
        task = _Task(
            seconds,
            tokens,
            table.degrees,
            work_after,
            pool.num_ranks,
            pool.token_budget,
            bubble_weight(pool),
            fixed,
        )
        start = _start(len(longest_first), num_microbatches, pool)
        best = _search(task, start, 0, 0, 0.0, best)
    return float(best)


class _Task(NamedTuple):
    """What does not change during a search."""

    seconds: FloatArray
    tokens: IntArray
    degrees: IntArray
    work_after: FloatArray
    num_ranks: int
    budget: int
    bubble: float
    fixed_s: float


class _Branch(NamedTuple):
    """The plan at hand: free ranks and height of each MB; MB, degree, load, tokens of groups."""

    free: IntArray
    height: FloatArray
    microbatch: IntArray
    degree: IntArray
    load: FloatArray
    used: IntArray


def _start(num_sequences: int, num_microbatches: int, pool: PoolShape) -> _Branch:
    return _Branch(
        np.full(num_microbatches, pool.num_ranks, dtype=np.int64),
        np.zeros(num_microbatches),
        np.zeros(num_sequences, dtype=np.int64),
        np.zeros(num_sequences, dtype=np.int64),
        np.zeros(num_sequences),
        np.zeros(num_sequences, dtype=np.int64),
    )


@njit(cache=True)
def _open(branch: _Branch, group: int, microbatch: int, degree: int) -> None:
    branch.microbatch[group] = microbatch
    branch.degree[group] = degree
    branch.load[group] = 0.0
    branch.used[group] = 0


@njit(cache=True)
def _search(
    task: _Task, branch: _Branch, sequence: int, num_groups: int, work: float, best: float
) -> float:
    """The best iteration below `best` that this branch leads to, else `best`."""
    heights: float = max(branch.height.sum(), (work + task.work_after[sequence]) / task.num_ranks)
    least = heights + task.bubble * float(branch.height.max()) + task.fixed_s
    if least >= best or sequence == len(task.tokens):
        return min(least, best)
    num_degrees = len(task.degrees)
    for option in range(num_groups + len(branch.free) * num_degrees):
        group = min(option, num_groups)
        if option >= num_groups:
            microbatch, degree = divmod(option - num_groups, num_degrees)
            if microbatch > 0 and branch.free[microbatch - 1] == task.num_ranks:
                break  # the one before is empty too: this one is no different
            _open(branch, group, microbatch, degree)
        microbatch, degree = branch.microbatch[group], branch.degree[group]
        load, height = branch.load[group], branch.height[microbatch]
        tokens, seconds = task.tokens[sequence, degree], task.seconds[sequence, degree]
        width = task.degrees[degree] * (group == num_groups)
        if branch.used[group] + tokens > task.budget or width > branch.free[microbatch]:
            continue
        branch.load[group] = load + seconds
        branch.height[microbatch] = max(height, load + seconds)
        branch.used[group] += tokens
        branch.free[microbatch] -= width
        after = work + seconds * task.degrees[degree]
        best = _search(task, branch, sequence + 1, max(num_groups, group + 1), after, best)
        branch.load[group] = load
        branch.height[microbatch] = height
        branch.used[group] -= tokens
        branch.free[microbatch] += width
    return best
