"""Step 6 of hydra-opt: where ranks are idle, cut the highest groups wider."""

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
    """Give the groups of each microbatch the degrees of its least height, in place.

    Only the highest group sets a microbatch's height: it is widened for as long as that lowers
    it, and ranks that would not lower it stay idle. O(N D + groups x MBs).
    """
    load_at = loads_at_degrees(task, group_of, len(degree))
    for at in range(num_microbatches):
        low, high = 0.0, 0.0
        for group in range(len(degree)):
            if microbatch[group] == at:
                high = max(high, load[group])
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if ranks_needed(task, at, microbatch, load_at, middle) <= task.num_ranks:
                high = middle
            else:
                low = middle
        for group in range(len(degree)):
            if microbatch[group] == at:
                degree[group] = first_below(load_at, group, high)
                load[group] = load_at[group, degree[group]]


@kernel
def loads_at_degrees(task: Task, group_of: IntArray, num_groups: int) -> FloatArray:
    """[groups, D] the load of each group at each degree, infinite beyond the budget."""
    lengths, costs, degrees, pad_unit = task.lengths, task.costs, task.degrees, task.pad_unit
    num_degrees = len(degrees)
    load_at = np.zeros((num_groups, num_degrees))
    used = np.zeros((num_groups, num_degrees), np.int64)
    for place in range(len(lengths)):
        group = group_of[place]
        for at in range(num_degrees):
            seconds, tokens = on_rank(lengths[place], at, costs, degrees, pad_unit)
            load_at[group, at] += seconds
            used[group, at] += tokens
    for group in range(num_groups):
        for at in range(num_degrees):
            if used[group, at] > task.budget:
                load_at[group, at] = np.inf
    return load_at


@kernel
def ranks_needed(
    task: Task, at: int, microbatch: IntArray, load_at: FloatArray, height: float
) -> int:
    """Ranks that a microbatch's groups need to keep a height; more than the pool if none do."""
    ranks = 0
    for group in range(len(microbatch)):
        if microbatch[group] == at:
            degree = first_below(load_at, group, height)
            if degree < 0:
                return task.num_ranks + 1
            ranks += task.degrees[degree]
    return ranks


@kernel
def first_below(load_at: FloatArray, group: int, height: float) -> int:
    """The least degree at which a group keeps a height, or -1."""
    for degree in range(load_at.shape[1]):
        if load_at[group, degree] <= height:
            return degree
    return -1
