"""Steps 1 and 3 of hydra-opt: cut the long sequences and pack them into bins of uniform height.

A bin is a group that has no microbatch yet. With one target for all, which microbatch a bin goes
to does not matter, so bins are packed first and dealt last.
"""

from typing import NamedTuple

import numpy as np

from planner.cost import FloatArray
from planner.opt.bin_queue import NOBODY, enqueue, lightest, new_heads, take_out
from planner.opt.compiled import kernel
from planner.opt.task import Task, least_s, on_rank
from planner.pool import IntArray

SINGLE, NONE = -1, -1

# Rows of the table of room: what the lightest bin of each degree still takes on each of its ranks.
SECONDS, TOKENS = range(2)


class WideBins(NamedTuple):
    """The bins of two ranks and more, and who is in them.

    Args:
        degree: [bins] index into the task's degrees.
        load: [bins] seconds on each rank.
        used: [bins] tokens on each rank.
        bin_of: [long sequences] its bin, or SINGLE: it stays on one rank.
        width: ranks of all bins together.
    """

    degree: IntArray
    load: FloatArray
    used: IntArray
    bin_of: IntArray
    width: int


@kernel
def pack_wide(task: Task, target: float, most_ranks: int) -> WideBins:
    """Pack the long sequences, longest first, to a target. O(long x degrees).

    Each joins the lightest bin of the widest degree that takes it within target and budget, and
    otherwise opens a bin of the least degree that meets both; one that needs a single rank is
    left to `place_singles`. One that no degree brings under the target gets the fastest, and a
    bin to itself. Stops once the bins need more than `most_ranks` ranks.
    """
    lengths, costs, degrees = task.lengths, task.costs, task.degrees
    pad_unit, budget, num_long = task.pad_unit, task.budget, task.num_long
    join_waste = task.join_waste
    bin_degree, used = np.empty(num_long, np.int64), np.empty(num_long, np.int64)
    load, bin_of = np.empty(num_long), np.empty(num_long, np.int64)
    heads, following = new_heads(len(degrees)), np.empty(num_long, np.int64)
    room = np.empty((2, len(degrees)))
    first = np.empty(len(degrees), np.int64)
    bin_of[:] = SINGLE
    room[:] = -1.0
    num_bins, width, start = 0, 0, len(degrees) - 1
    for place in range(num_long):
        length = lengths[place]
        own, fastest = least_degree(length, start, target, budget, costs, degrees, pad_unit)
        start = own if own != NONE else start  # shorter ones need no more
        at = NONE
        if own != NONE:
            at = roomy_degree(length, own, room, join_waste, costs, degrees, pad_unit)
        if at != NONE:
            item = first[at]
            seconds, tokens = on_rank(length, at, costs, degrees, pad_unit)
            load[item] += seconds
            used[item] += tokens
            take_out(heads, at, following)
        elif own == 0:
            continue
        else:
            at, item = (own if own != NONE else fastest), num_bins
            bin_degree[item] = at
            load[item], used[item] = on_rank(length, at, costs, degrees, pad_unit)
            num_bins += 1
            width += degrees[at]
        bin_of[place] = item
        if own != NONE:
            enqueue(heads, at, following, item, load[item] / target)
            first[at] = lightest(heads, at)
            room[SECONDS, at] = target - load[first[at]]
            room[TOKENS, at] = budget - used[first[at]]
        if width > most_ranks:
            break
    return WideBins(bin_degree[:num_bins], load[:num_bins], used[:num_bins], bin_of, width)


@kernel
def least_degree(
    length: int,
    start: int,
    target: float,
    budget: int,
    costs: FloatArray,
    degrees: IntArray,
    pad_unit: int,
) -> tuple[int, int]:
    """The least degree, at most `start`, that meets target and budget, or NONE; and the fastest.

    c is not monotone in the degree, as ring time can outgrow what a wider group saves: the walk
    down goes on until it has met the target and lost it again.
    """
    own, fastest, fastest_s = NONE, start, np.inf
    for at in range(start, -1, -1):
        if own != NONE and least_s(length, at, costs) > target:
            break
        seconds, tokens = on_rank(length, at, costs, degrees, pad_unit)
        if tokens > budget or (own != NONE and seconds > target):
            break
        if seconds <= target:
            own = at
        if seconds < fastest_s:
            fastest, fastest_s = at, seconds
    return own, fastest


@kernel
def roomy_degree(
    length: int,
    own: int,
    room: FloatArray,
    join_waste: float,
    costs: FloatArray,
    degrees: IntArray,
    pad_unit: int,
) -> int:
    """The widest degree, two ranks or more, whose lightest bin takes the sequence, or NONE.

    But no degree at which the ranks together work `join_waste` times as long as at its own:
    traffic and padding eat the room there, and it costs less to leave it to a lower microbatch.
    """
    most_work = join_waste * on_rank(length, own, costs, degrees, pad_unit)[0] * degrees[own]
    for at in range(room.shape[1] - 1, max(own, 1) - 1, -1):
        if room[SECONDS, at] < least_s(length, at, costs):
            continue
        seconds, tokens = on_rank(length, at, costs, degrees, pad_unit)
        if seconds * degrees[at] > most_work:
            continue
        if seconds <= room[SECONDS, at] and tokens <= room[TOKENS, at]:
            return at
    return NONE


@kernel
def top_up(task: Task, bins: WideBins, order: IntArray, group_of: IntArray, level: float) -> None:
    """Fill the gaps of bins up to a level with short sequences, longest first, in place. O(N).

    Args:
        task: the batch.
        bins: the bins; their load and used tokens grow.
        order: bins by falling load.
        group_of: [N] the bin of each sequence or SINGLE; short ones that join get their bin.
        level: seconds no bin is filled beyond.
    """
    lengths, costs, degrees = task.lengths, task.costs, task.degrees
    pad_unit, budget, join_waste = task.pad_unit, task.budget, task.join_waste
    bin_degree, load, used = bins.degree, bins.load, bins.used
    heads, following = new_heads(task.num_joinable), np.empty(len(order), np.int64)
    room, first = np.empty((2, task.num_joinable)), np.empty(task.num_joinable, np.int64)
    room[:] = -1.0
    for item in order[::-1]:
        if load[item] < level and bin_degree[item] < task.num_joinable:
            enqueue(heads, bin_degree[item], following, item, load[item] / level)
    for at in range(1, task.num_joinable):
        first[at] = lightest(heads, at)
        if first[at] != NOBODY:
            room[SECONDS, at] = level - load[first[at]]
            room[TOKENS, at] = budget - used[first[at]]
    for place in range(task.num_long, len(lengths)):
        length = lengths[place]
        if length < task.least_joining:
            break
        at = roomy_degree(length, 0, room, join_waste, costs, degrees, pad_unit)
        if at != NONE:
            item = first[at]
            seconds, tokens = on_rank(length, at, costs, degrees, pad_unit)
            load[item] += seconds
            used[item] += tokens
            group_of[place] = item
            take_out(heads, at, following)
            enqueue(heads, at, following, item, load[item] / level)
            first[at] = lightest(heads, at)
            room[SECONDS, at] = level - load[first[at]]
            room[TOKENS, at] = budget - used[first[at]]
