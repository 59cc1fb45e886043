"""Step 2 of hydra-opt: search the target and the MB count under the iteration-time model."""

import numpy as np

from planner.cost import CostTable, FloatArray
from planner.opt.entry import explore, fill_in
from planner.opt.explore import MOST_COUNTS, Brackets, Candidates
from planner.opt.task import Task, sample
from planner.pool import IntArray

# So many MB counts are bisected so often, between these shares of the even load per MB.
PROMISING, BISECTIONS = 3, 5
LOWEST, HIGHEST = 0.7, 1.4
# The best target is varied by these factors.
BESIDE = np.array([0.985, 0.99, 0.995, 1.005, 1.01, 1.015])
# Batches of so few sequences are tried with so many targets more.
FEW, GRID_POINTS = 1024, 64
# Pools at least twice as large as this are searched on a sample: every r-th sequence on G / r
# ranks. At full size its best is estimated, and bisected about.
SEARCH_RANKS = 512
CLOSE, CLOSE_BISECTIONS = 1.01, 2

NO_BRACKETS = Brackets(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))


def find_targets(task: Task, table: CostTable) -> Candidates:
    """Targets worth a plan, by rising estimate."""
    every = task.num_ranks // SEARCH_RANKS
    if every < 2:
        return search(task, table)
    found = search(fill_in(sample(task, every)), table)
    best = found.target[:1]
    close = Brackets(found.num_microbatches[:1], best / CLOSE, best * CLOSE)
    return by_estimate(explore(task, close, CLOSE_BISECTIONS, best))


def search(task: Task, table: CostTable) -> Candidates:
    """For each promising MB count the targets that level out, and a few beside the best.

    Also the longest's load at every degree: the iteration jumps there, so levels miss it.
    """
    alone_s = table.sequence_s(task.lengths[:1], np.arange(len(task.degrees)))
    even_s = task.work_s / task.num_ranks
    edges = alone_s[alone_s < 2 * even_s / task.fewest]
    counts = promising_counts(task, float(alone_s.min()), even_s)
    brackets = Brackets(counts, LOWEST * even_s / counts, HIGHEST * even_s / counts)
    targets = np.concatenate((edges, wide_grid(task, float(alone_s[0]), even_s)))
    found = explore(task, brackets, BISECTIONS, targets)
    best = found.target[np.argmin(found.estimate_s)]
    beside = explore(task, NO_BRACKETS, 0, best * BESIDE)
    return by_estimate(joined(found, beside))


def by_estimate(found: Candidates) -> Candidates:
    """Candidates by rising estimate; ties in their order."""
    order = np.argsort(found.estimate_s, kind="stable")
    return Candidates(found.target[order], found.num_microbatches[order], found.estimate_s[order])


def joined(first: Candidates, second: Candidates) -> Candidates:
    """The candidates of both."""
    return Candidates(
        np.concatenate((first.target, second.target)),
        np.concatenate((first.num_microbatches, second.num_microbatches)),
        np.concatenate((first.estimate_s, second.estimate_s)),
    )


def promising_counts(task: Task, lowest_s: float, even_s: float) -> IntArray:
    """The legal MB counts of the least M t0 + (p-1)/v max(H, W/(G M)), best first.

    Args:
        task: the batch.
        lowest_s: H, the least load the longest sequence can have.
        even_s: W/G, the work of all microbatches spread evenly.
    """
    counts = task.fewest + task.step * np.arange(MOST_COUNTS)
    value = counts * task.fixed_s + task.bubble * np.maximum(lowest_s, even_s / counts)
    return counts[np.argsort(value, kind="stable")[:PROMISING]]


def wide_grid(task: Task, longest_s: float, even_s: float) -> FloatArray:
    """For a batch of few sequences, too coarse a fluid to level out: targets of all sizes."""
    if len(task.lengths) > FEW:
        return np.zeros(0)
    low = LOWEST * even_s / (task.fewest + MOST_COUNTS * task.step)
    return np.geomspace(low, max(2 * even_s / task.fewest, longest_s), GRID_POINTS)
