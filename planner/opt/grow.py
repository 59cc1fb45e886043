"""Step 5 of hydra-opt: where ranks are idle, cut the highest groups wider."""

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.opt.task import Task, on_rank
from planner.pool import IntArray

# Halvings of the height that a microbatch is fitted to: 2^-20 of it is left.
HALVINGS = 20


@kernel
def grow_into_idle_ranks(
    task: Task,
    microbatch: IntArray,
    degree: IntArray,
    load: FloatArray,
    group_of: IntArray,
    num_microbatches: int,
) -> None:
    """Refit the microbatches with idle ranks, in place. O(N D) if there are any, else O(groups).

    Only the highest group sets a microbatch's height: it is widened for as long as that lowers
    it, and ranks that would not lower it stay idle.
    """
    free = np.full(num_microbatches, task.num_ranks, np.int64)
    for group in range(len(degree)):
        free[microbatch[group]] -= task.degrees[degree[group]]
    if free.max() == 0:
        return
    load_at = loads_at_degrees(task, group_of, len(degree))
    for at in range(num_microbatches):
        if free[at] > 0:
            fit_microbatch(task, np.nonzero(microbatch == at)[0], load_at, degree, load)


@kernel
def loads_at_degrees(task: Task, group_of: IntArray, num_groups: int) -> FloatArray:
    """[groups, D] the load of each group at each degree, infinite beyond the budget."""
    lengths, costs, degrees, pad_unit = task.lengths, task.costs, task.degrees, task.pad_unit
    num_degrees = len(degrees)
    load_at = np.zeros((num_groups, num_degrees))
    used = np.zeros((num_groups, num_degrees), np.int64)
    for sequence in range(len(lengths)):
        group = group_of[sequence]
        for degree in range(num_degrees):
            length = lengths[sequence]
            seconds, tokens = on_rank(length, degree, costs, degrees, pad_unit)
            load_at[group, degree] += seconds
            used[group, degree] += tokens
    for group in range(num_groups):
        for degree in range(num_degrees):
            if used[group, degree] > task.budget:
                load_at[group, degree] = np.inf
    return load_at


@kernel
def fit_microbatch(
    task: Task, groups: IntArray, load_at: FloatArray, degree: IntArray, load: FloatArray
) -> None:
    """Give the groups of one microbatch the degrees of the least height, in place."""
    if len(groups) == 0:
        return
    high, low = load[groups].max(), 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if ranks_needed(task, groups, load_at, middle) <= task.num_ranks:
            high = middle
        else:
            low = middle
    for group in groups:
        degree[group] = first_below(load_at[group], high)
        load[group] = load_at[group, degree[group]]


@kernel
def ranks_needed(task: Task, groups: IntArray, load_at: FloatArray, height: float) -> int:
    """Ranks that groups need to stay within a height; more than the pool has if none do."""
    ranks = 0
    for group in groups:
        degree = first_below(load_at[group], height)
        if degree < 0:
            return task.num_ranks + 1
        ranks += task.degrees[degree]
    return ranks


@kernel
def first_below(load_at: FloatArray, height: float) -> int:
    """The least degree of a group that keeps a height, or -1."""
    for degree in range(len(load_at)):
        if load_at[degree] <= height:
            return degree
    return -1
