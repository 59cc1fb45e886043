"""The best plan of tiny inputs, by trying all: yardstick of the tests, and finish of hydra-opt."""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.cost import CostModel, CostTable, FloatArray
from planner.iteration import bubble_weight
from planner.pool import IntArray, PoolShape


class Solution(NamedTuple):
    """The best plan found.

    Args:
        iteration_s: what it takes, or the time to beat if nothing beats it.
        num_microbatches: M; 0 if nothing beats the time to beat.
        microbatch: [groups] the MB of each group.
        degree: [groups] index into the pool's degrees.
        group_of: [N] the group of each sequence, longest first.
    """

    iteration_s: float
    num_microbatches: int
    microbatch: IntArray
    degree: IntArray
    group_of: IntArray


def exact_iteration_s(
    lengths: IntArray, pool: PoolShape, cost: CostModel, *, at_most_s: float = np.inf
) -> float:
    """The least iteration (`iteration_s`, whole pool) of any plan with the pool's degrees.

    Exponential in N: about a second for 8 sequences on 8 ranks.

    Args:
        lengths: [N] tokens of each sequence.
        pool: the pool.
        cost: the cost model.
        at_most_s: the time of a known plan, or infinity. Returned if nothing is better.
    """
    if len(lengths) == 0:
        return 0.0
    longest_first = -np.sort(-np.asarray(lengths, dtype=np.int64))
    return solve(longest_first, pool, cost.table(pool), at_most_s).iteration_s


def solve(
    longest_first: IntArray,
    pool: PoolShape,
    table: CostTable,
    at_most_s: float,
    most_nodes: int = np.iinfo(np.int64).max,
) -> Solution:
    """Branch and bound: the plan of the least iteration below `at_most_s`.

    Sequences are placed longest first, each into every open group and into every new group that
    free ranks allow; a branch ends when it cannot become better than the best plan so far.
    Equal sequences are interchangeable, so each goes no further forward than the one before it.

    Args:
        longest_first: [N] lengths, falling.
        pool: the pool.
        table: its costs.
        at_most_s: the time to beat.
        most_nodes: give up a MB count after so many branches: the best so far is returned.
    """
    unit = table.degrees * pool.pad_unit
    tokens = -(-longest_first[:, None] // unit) * pool.pad_unit
    seconds = table.sequence_s(longest_first[:, None], np.arange(len(unit))[None, :])
    seconds[tokens > pool.token_budget] = np.inf
    is_repeat = (np.diff(longest_first, prepend=0) == 0).astype(np.int64)
    work = (seconds * table.degrees).min(axis=1)
    work_after = np.concatenate((np.cumsum(work[::-1])[::-1], [0.0]))
    bubble, step = bubble_weight(pool), pool.legal_num_microbatches(1)
    nothing = np.zeros(0, dtype=np.int64)
    best = Solution(at_most_s, 0, nothing, nothing, nothing)
    # More microbatches than sequences leave one empty, which only costs.
    most = pool.legal_num_microbatches(len(longest_first))
    for count in range(step, most + 1, step):
        fixed = (count + bubble) * table.fixed_s
        task = _Task(
            seconds, tokens, is_repeat, table.degrees, work_after, pool.num_ranks,
            pool.token_budget, bubble, fixed,
        )  # fmt: skip
        branch = _start(len(longest_first), count, pool.num_ranks, most_nodes)
        found = float(_search(task, branch, 0, 0, 0.0, best.iteration_s))
        if found < best.iteration_s:
            groups = int(branch.best_group_of.max()) + 1
            microbatch, degree = branch.best_microbatch[:groups], branch.best_degree[:groups]
            best = Solution(found, count, microbatch, degree, branch.best_group_of)
    return best


class _Task(NamedTuple):
    """What does not change during a search. A repeat is as long as the sequence before it."""

    seconds: FloatArray
    tokens: IntArray
    is_repeat: IntArray
    degrees: IntArray
    work_after: FloatArray
    num_ranks: int
    budget: int
    bubble: float
    fixed_s: float


class _Branch(NamedTuple):
    """The plan at hand (by MB, by group, by sequence), the nodes left, and the best plan."""

    free: IntArray
    height: FloatArray
    microbatch: IntArray
    degree: IntArray
    load: FloatArray
    used: IntArray
    group_of: IntArray
    nodes_left: IntArray
    best_microbatch: IntArray
    best_degree: IntArray
    best_group_of: IntArray


def _start(num_sequences: int, num_microbatches: int, num_ranks: int, most_nodes: int) -> _Branch:
    def zeros() -> IntArray:
        return np.zeros(num_sequences, dtype=np.int64)

    return _Branch(
        free=np.full(num_microbatches, num_ranks, dtype=np.int64),
        height=np.zeros(num_microbatches),
        microbatch=zeros(),
        degree=zeros(),
        load=np.zeros(num_sequences),
        used=zeros(),
        group_of=zeros(),
        nodes_left=np.array([most_nodes]),
        best_microbatch=zeros(),
        best_degree=zeros(),
        best_group_of=zeros(),
    )


@njit(cache=True)
def _open(branch: _Branch, group: int, microbatch: int, degree: int) -> None:
    branch.microbatch[group] = microbatch
    branch.degree[group] = degree
    branch.load[group] = 0.0
    branch.used[group] = 0


@njit(cache=True)
def _keep(branch: _Branch) -> None:
    branch.best_microbatch[:] = branch.microbatch
    branch.best_degree[:] = branch.degree
    branch.best_group_of[:] = branch.group_of


@njit(cache=True, nogil=True)
def _search(
    task: _Task, branch: _Branch, sequence: int, num_groups: int, work: float, best: float
) -> float:
    """The best iteration below `best` that this branch leads to, else `best`."""
    heights: float = max(branch.height.sum(), (work + task.work_after[sequence]) / task.num_ranks)
    least = heights + task.bubble * float(branch.height.max()) + task.fixed_s
    branch.nodes_left[0] -= 1
    if least >= best or branch.nodes_left[0] < 0:
        return best
    if sequence == len(task.tokens):
        _keep(branch)
        return least
    num_degrees = len(task.degrees)
    first = branch.group_of[sequence - 1] if task.is_repeat[sequence] else 0
    for option in range(first, num_groups + len(branch.free) * num_degrees):
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
        branch.group_of[sequence] = group
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
