"""What a packing would cost, without dealing it: the heights of its microbatches."""

from typing import NamedTuple

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.opt.task import Task, on_rank
from planner.opt.wide import SINGLE, WideBins
from planner.pool import IntArray

# Bins are ordered by load to one part in so many of the highest: a counting sort is enough.
LOAD_LEVELS = 2048
# Whole sequences leave a few tokens of a token-full rank unused.
FILLABLE_SHARE = 0.995


class Singles(NamedTuple):
    """The sequences that stay on one rank: the long ones one by one, and sums over all.

    Args:
        sequence: [long singles] longest first.
        seconds: [long singles] their loads.
        total_s: seconds of all singles, short ones too.
        total_tokens: padded tokens of all singles.
    """

    sequence: IntArray
    seconds: FloatArray
    total_s: float
    total_tokens: int


@kernel
def find_singles(task: Task, bins: WideBins) -> Singles:
    """The long sequences no bin took, and the totals. O(long)."""
    lengths, costs, degrees, pad_unit = task.lengths, task.costs, task.degrees, task.pad_unit
    bin_of, count, total_s, total_tokens = bins.bin_of, 0, task.short_s, task.short_tokens
    sequence, seconds = np.empty(task.num_long, np.int64), np.empty(task.num_long)
    for place in range(task.num_long):
        if bin_of[place] == SINGLE:
            sequence[count] = place
            seconds[count], tokens = on_rank(lengths[place], 0, costs, degrees, pad_unit)
            total_s += seconds[count]
            total_tokens += tokens
            count += 1
    return Singles(sequence[:count], seconds[:count], total_s, total_tokens)


@kernel
def falling_order(load: FloatArray) -> IntArray:
    """Bins by falling load, to one part in LOAD_LEVELS; ties in their order. O(bins)."""
    highest = load.max() if len(load) else 0.0
    scale = (LOAD_LEVELS - 1) / highest if highest > 0 else 0.0
    first = np.zeros(LOAD_LEVELS + 1, np.int64)
    for item in load:
        first[LOAD_LEVELS - int(item * scale)] += 1
    for level in range(1, LOAD_LEVELS + 1):
        first[level] += first[level - 1]
    order = np.empty(len(load), np.int64)
    for item in range(len(load)):
        level = LOAD_LEVELS - 1 - int(load[item] * scale)
        order[first[level]] = item
        first[level] += 1
    return order


class Water(NamedTuple):
    """How high singles fill the one-rank slots and the gaps of bins.

    Args:
        level: seconds the one-rank slots are filled to.
        above: long singles, from the first, that stand out above the level.
        fill: seconds bins are filled to: the level, or more where slots have too few tokens;
            infinite if even that leaves tokens over.
    """

    level: float
    above: int
    fill: float


@kernel
def pour(
    task: Task, bins: WideBins, order: IntArray, singles: Singles, slots: int, target: float
) -> Water:
    """Let the singles find their level. O(bins + tall singles).

    A single taller than the level of the others takes a rank of its own. A bin below the level,
    of a degree that short sequences may join, is filled up to it. If the slots would hold too
    many tokens then, as much more is poured into bins as it takes, up to the target.
    """
    if slots <= 0:
        return Water(0.0, 0, 0.0 if singles.total_tokens == 0 else np.inf)
    seconds, load, degree, degrees = singles.seconds, bins.load, bins.degree, task.degrees
    rest_s, above, lowest = singles.total_s, 0, len(order) - 1
    filled_ranks, filled_s = 0, 0.0  # of the bins below the level, before anything is poured
    while True:
        ranks = slots - above + filled_ranks
        level = (rest_s + filled_s) / ranks
        if above < min(len(seconds), slots - 1) and seconds[above] > level:
            rest_s -= seconds[above]
            above += 1
        elif lowest >= 0 and load[order[lowest]] < level:
            if degree[order[lowest]] < task.num_joinable:
                filled_ranks += degrees[degree[order[lowest]]]
                filled_s += degrees[degree[order[lowest]]] * load[order[lowest]]
            lowest -= 1
        else:
            break
    level, rest_s = max(level, 0.0), max(rest_s, 0.0)
    held_tokens = FILLABLE_SHARE * task.budget * slots
    needed_s = rest_s * (1.0 - held_tokens / max(singles.total_tokens, 1))
    if needed_s <= level * filled_ranks - filled_s:
        return Water(level, above, level)
    fill = (needed_s + filled_s) / filled_ranks if filled_ranks else np.inf
    while lowest >= 0 and load[order[lowest]] < min(fill, target):
        if degree[order[lowest]] < task.num_joinable:
            filled_ranks += degrees[degree[order[lowest]]]
            filled_s += degrees[degree[order[lowest]]] * load[order[lowest]]
            fill = (needed_s + filled_s) / filled_ranks
        lowest -= 1
    level = (rest_s - needed_s) / (slots - above)
    return Water(level, above, fill if fill <= target else np.inf)


@kernel
def estimate(
    task: Task,
    bins: WideBins,
    order: IntArray,
    singles: Singles,
    num_microbatches: int,
    target: float,
) -> float:
    """Iteration seconds if bins and singles were dealt by falling load; infinite if impossible.

    Microbatch m is as high as the load at slot m G of all loads in falling order, a bin taking
    as many slots as it is wide. O(bins + tall singles).
    """
    slots = num_microbatches * task.num_ranks - bins.width
    water = pour(task, bins, order, singles, slots, target)
    if slots < 0 or water.fill == np.inf:
        return np.inf
    load, degree, seconds = bins.load, bins.degree, singles.seconds
    level, degrees, num_ranks = water.level, task.degrees, task.num_ranks
    heights, highest = 0.0, level
    covered, height, next_bin, next_single = 0, np.inf, 0, 0
    for microbatch in range(num_microbatches):
        while covered <= microbatch * num_ranks and height > level:
            bin_load = max(load[order[next_bin]], water.fill) if next_bin < len(order) else level
            single_load = seconds[next_single] if next_single < water.above else level
            height = max(bin_load, single_load)
            if bin_load >= single_load and next_bin < len(order):
                covered += degrees[degree[order[next_bin]]]
                next_bin += 1
            else:
                covered += 1
                next_single += 1
        heights += max(height, level)
        highest = max(highest, height)
    return heights + num_microbatches * task.fixed_s + task.bubble * (task.fixed_s + highest)
