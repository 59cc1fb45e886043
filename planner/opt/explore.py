"""Step 2 of hydra-opt, compiled: what packing to a target would lead to, for many targets."""

from typing import NamedTuple

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.opt.profile import estimate, falling_order, find_singles, pour
from planner.opt.task import Task
from planner.opt.wide import pack_wide
from planner.pool import IntArray

# MB counts are tried until so many in a row were worse than the best, at most so many.
PATIENCE, MOST_COUNTS = 2, 64


class Candidates(NamedTuple):
    """[targets] targets, the best MB count of each, and its estimated iteration."""

    target: FloatArray
    num_microbatches: IntArray
    estimate_s: FloatArray


class Brackets(NamedTuple):
    """[counts] MB counts, and between which targets to bisect for the best of each."""

    num_microbatches: IntArray
    low: FloatArray
    high: FloatArray


@kernel
def explore(task: Task, brackets: Brackets, bisections: int, targets: FloatArray) -> Candidates:
    """Estimate the targets given, behind those that bisection finds.

    At its best target a MB count has singles about as high as bins: lower targets leave singles
    towering, higher ones leave them idle. O((long x degrees) x targets).
    """
    counts, lows, highs = brackets.num_microbatches, brackets.low, brackets.high
    capacity = len(counts) * bisections + len(targets)
    found = Candidates(np.empty(capacity), np.empty(capacity, np.int64), np.empty(capacity))
    place = 0
    for bracket in range(len(counts)):
        low, high = lows[bracket], highs[bracket]
        for _ in range(bisections):
            middle = np.sqrt(low * high)
            if evaluate(task, middle, counts[bracket], found, place) > middle:
                low = middle
            else:
                high = middle
            place += 1
    for target in targets:
        evaluate(task, target, task.fewest, found, place)
        place += 1
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
        value = estimate(task, bins, order, singles, num_microbatches, target)
        if value < best:
            best, best_at, worse = value, num_microbatches, 0
        elif value < np.inf:
            worse += 1
            if worse > PATIENCE:
                break
    found.target[place], found.num_microbatches[place] = target, best_at
    found.estimate_s[place] = best
    water = pour(task, bins, order, singles, level_at * task.num_ranks - bins.width, target)
    return water.level if water.fill < np.inf else np.inf
