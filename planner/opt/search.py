"""Step 2 of hydra-opt: search the target and the MB count under the iteration-time model."""

from typing import NamedTuple

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.opt.profile import estimate, falling_order, find_singles, pour
from planner.opt.task import Task, on_rank, sample
from planner.opt.wide import pack_wide
from planner.pool import IntArray

# So many MB counts are bisected so often, from these shares of the even load per MB.
PROMISING = 3
BISECTIONS = 7
LOWEST, HIGHEST = 0.7, 1.4
# Batches of so few sequences are tried with so many targets more.
FEW, GRID_POINTS = 1024, 64
# The best target is varied by these factors.
BESIDE = (0.985, 0.99, 0.995, 1.005, 1.01, 1.015)
# MB counts are tried until so many in a row were worse than the best, at most so many.
PATIENCE = 2
MOST_COUNTS = 64
# Pools larger than this are searched on a sample: every r-th sequence on G / r ranks.
SEARCH_RANKS = 512
# So many of the sample's targets are estimated at full size.
FINALISTS = 4


class Candidates(NamedTuple):
    """Targets with their best MB count, by rising estimate."""

    target: FloatArray
    num_microbatches: IntArray
    estimate_s: FloatArray


@kernel
def search(task: Task) -> Candidates:
    """Targets worth a plan, by rising estimate. O((long x degrees) x evaluations).

    For each promising MB count the targets about where singles stand as high as bins; the
    longest's load at every degree, where a step of the staircase is; and a few beside the best.
    """
    work_s = even_load_s(task)
    counts = promising_counts(task, work_s)
    grid = wide_grid(task, work_s)
    capacity = len(counts) * BISECTIONS + len(grid) + len(task.degrees) + len(BESIDE)
    found = Candidates(np.empty(capacity), np.empty(capacity, np.int64), np.empty(capacity))
    used = 0
    for num_microbatches in counts:
        low, high = LOWEST * work_s / num_microbatches, HIGHEST * work_s / num_microbatches
        for _ in range(BISECTIONS):
            middle = np.sqrt(low * high)
            if evaluate(task, middle, num_microbatches, found, used) > middle:
                low = middle
            else:
                high = middle
            used += 1
    for target in grid:
        evaluate(task, target, task.fewest, found, used)
        used += 1
    for degree in range(len(task.degrees)):
        alone_s = load_alone_s(task, 0, degree)
        if alone_s < 2 * work_s / task.fewest:
            evaluate(task, alone_s, task.fewest, found, used)
            used += 1
    best = found.target[np.argmin(found.estimate_s[:used])]
    for factor in BESIDE:
        evaluate(task, best * factor, task.fewest, found, used)
        used += 1
    order = np.argsort(found.estimate_s[:used], kind="mergesort")
    return Candidates(found.target[order], found.num_microbatches[order], found.estimate_s[order])


@kernel
def wide_grid(task: Task, work_s: float) -> FloatArray:
    """For a batch of few sequences, too coarse a fluid to find its level: targets of all sizes."""
    if len(task.lengths) > FEW:
        return np.empty(0)
    low = LOWEST * work_s / (task.fewest + MOST_COUNTS * task.step)
    high = max(2 * work_s / task.fewest, load_alone_s(task, 0, 0))
    return low * (high / low) ** (np.arange(GRID_POINTS) / (GRID_POINTS - 1))


@kernel
def even_load_s(task: Task) -> float:
    """Seconds of all work at its least, spread over the pool's ranks."""
    work = task.short_s
    for sequence in range(task.num_long):
        work += load_alone_s(task, sequence, 0)
    return work / task.num_ranks


@kernel
def load_alone_s(task: Task, sequence: int, degree: int) -> float:
    """c(s, k) of the sequence at a place of the sorted batch."""
    return on_rank(task.lengths[sequence], degree, task.costs, task.degrees, task.pad_unit)[0]


@kernel
def promising_counts(task: Task, work_s: float) -> IntArray:
    """The legal MB counts of the least M t0 + (p-1)/v W/(G M), best first."""
    lowest_s = np.inf
    for degree in range(len(task.degrees)):
        lowest_s = min(lowest_s, load_alone_s(task, 0, degree))
    counts = task.fewest + task.step * np.arange(MOST_COUNTS)
    value = counts * task.fixed_s + task.bubble * np.maximum(lowest_s, work_s / counts)
    return counts[np.argsort(value, kind="mergesort")[:PROMISING]]


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
    start = max(task.fewest, -(-bins.width // (task.step * task.num_ranks)) * task.step)
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


@kernel
def best_targets(task: Task) -> Candidates:
    """The best targets of a batch; of a large pool, the best of a sample at full size."""
    every = task.num_ranks // SEARCH_RANKS
    if every < 2:
        return search(task)
    found = search(sample(task, every))
    finalists = min(FINALISTS, len(found.target))
    full = Candidates(np.empty(finalists), np.empty(finalists, np.int64), np.empty(finalists))
    for at in range(finalists):
        evaluate(task, found.target[at], task.fewest, full, at)
    order = np.argsort(full.estimate_s, kind="mergesort")
    return Candidates(full.target[order], full.num_microbatches[order], full.estimate_s[order])
