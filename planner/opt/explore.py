"""Step 2 of hydra-opt, compiled: what packing to a target would lead to, for many targets."""

from typing import NamedTuple

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.opt.profile import estimate, falling_order, find_singles, pour
from planner.opt.task import Task
from planner.opt.wide import pack_wide
from planner.pool import IntArray

# From these shares of the even load per MB a target is halved down so often.
LOWEST, HIGHEST, BISECTIONS = 0.7, 1.4, 7
# MB counts are tried until so many in a row were worse than the best, at most so many.
PATIENCE, MOST_COUNTS = 2, 64


class Candidates(NamedTuple):
    """[targets] targets, the best MB count of each, and its estimated iteration."""

    target: FloatArray
    num_microbatches: IntArray
    estimate_s: FloatArray


@kernel
def explore(task: Task, counts: IntArray, targets: FloatArray) -> Candidates:
    """Estimate the targets given, behind those that level out at the MB counts given.

    At its best target a MB count has singles about as high as bins: lower targets leave singles
    towering, higher ones leave them idle. O((long x degrees) x targets).
    """
    bisected = len(counts) * BISECTIONS
    capacity = bisected + len(targets)
    found = Candidates(np.empty(capacity), np.empty(capacity, np.int64), np.empty(capacity))
    low, high = 0.0, 0.0
    for place in range(bisected):
        num_microbatches = counts[place // BISECTIONS]
        if place % BISECTIONS == 0:
            even_s = task.work_s / (task.num_ranks * num_microbatches)
            low, high = LOWEST * even_s, HIGHEST * even_s
        middle = np.sqrt(low * high)
        if evaluate(task, middle, num_microbatches, found, place) > middle:
            low = middle
        else:
            high = middle
    for place in range(bisected, capacity):
        evaluate(task, targets[place - bisected], task.fewest, found, place)
    return found


@kernel
def evaluate(task: Task, target: float, level_at: int, found: Candidates, place: int) -> float:
    """Pack to a target, note the best MB count and its estimate at a place of `found`.

    Returns the level of singles at the count `level_at`; infinite if their tokens do not fit.
    """
    most = MOST_COUNTS * task.step + task.fewest
    bins = pack_wide(task, target, most * task.num_ranks)
    order = falling_order(bins.load)
    singles = find_singles(task, bins)
    best, best_at, worse = np.inf, task.fewest, 0
    held = task.step * task.num_ranks
    start = max(task.fewest, (bins.width + held - 1) // held * task.step)
    for num_microbatches in range(start, most + 1, task.step):
        value = estimate(task, bins, order, singles, num_microbatches)
        if value < best:
            best, best_at, worse = value, num_microbatches, 0
        elif value < np.inf:
            worse += 1
            if worse > PATIENCE:
                break
    found.target[place], found.num_microbatches[place] = target, best_at
    found.estimate_s[place] = best
    slots = level_at * task.num_ranks - bins.width
    if slots <= 0 or singles.total_tokens > slots * task.budget:
        return np.inf
    return pour(task, bins, order, singles, slots).level
