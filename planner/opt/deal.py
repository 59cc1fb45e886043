"""Step 5 of hydra-opt: deal the bins to microbatches."""

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.opt.profile import falling_order
from planner.opt.task import Task
from planner.pool import IntArray


@kernel
def deal(task: Task, degree: IntArray, load: FloatArray, num_microbatches: int) -> IntArray:
    """[groups] the microbatch of each group; empty if they do not fit so many. O(groups x D).

    By falling load, so that the highest share a microbatch and only its height is high. Widths
    may then fail to fill a microbatch to the last rank; by falling width they fit if anything
    does, as each degree divides the next wider (the widest, if odd, fills a whole microbatch).
    """
    order = falling_order(load)
    microbatch = deal_by_load(task, degree, load, order, num_microbatches)
    if len(microbatch) < len(degree):
        microbatch = deal_by_width(task, degree, order, num_microbatches)
    return microbatch


@kernel
def deal_by_load(
    task: Task, degree: IntArray, load: FloatArray, order: IntArray, num_microbatches: int
) -> IntArray:
    """Fill one microbatch after the other with the highest group that still has room."""
    queue, first = by_degree(order, degree, len(task.degrees))
    head, last = first[:-1].copy(), first[1:]
    microbatch = np.empty(len(degree), np.int64)
    dealt = 0
    for at in range(num_microbatches):
        free = task.num_ranks
        while free > 0:
            best, highest = -1, -1.0
            for option in range(len(head)):
                if head[option] == last[option] or task.degrees[option] > free:
                    continue
                if load[queue[head[option]]] >= highest:  # of equals the widest
                    best, highest = option, load[queue[head[option]]]
            if best < 0:
                break
            microbatch[queue[head[best]]] = at
            head[best] += 1
            free -= task.degrees[best]
            dealt += 1
    return microbatch if dealt == len(degree) else microbatch[:0]


@kernel
def deal_by_width(task: Task, degree: IntArray, order: IntArray, num_microbatches: int) -> IntArray:
    """First fit by falling width, by falling load within a width."""
    queue, first = by_degree(order, degree, len(task.degrees))
    free = np.empty(num_microbatches, np.int64)
    free[:] = task.num_ranks
    microbatch = np.empty(len(degree), np.int64)
    for option in range(len(task.degrees) - 1, -1, -1):
        at = 0
        for place in range(first[option], first[option + 1]):
            while at < num_microbatches and free[at] < task.degrees[option]:
                at += 1
            if at == num_microbatches:
                return microbatch[:0]
            microbatch[queue[place]] = at
            free[at] -= task.degrees[option]
    return microbatch


@kernel
def by_degree(order: IntArray, degree: IntArray, num_degrees: int) -> tuple[IntArray, IntArray]:
    """The order split by degree, and where each degree begins in it (and the last ends)."""
    first = np.zeros(num_degrees + 1, np.int64)
    for group in order:
        first[degree[group] + 1] += 1
    for option in range(num_degrees):
        first[option + 1] += first[option]
    at = first.copy()
    queue = np.empty(len(order), np.int64)
    for group in order:
        queue[at[degree[group]]] = group
        at[degree[group]] += 1
    return queue, first
