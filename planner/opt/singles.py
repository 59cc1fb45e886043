"""Step 4 of hydra-opt: give every one-rank slot its share of the sequences that are not cut.

Longest processing time first: each sequence goes to the lightest slot that has the tokens. The
slots wait in a bucket queue (a list per whole level of load), so a sequence costs a few
nanoseconds instead of a heap's logarithm; slots too full for the sequence at hand are parked by
free tokens until the sequences are short enough.
"""

from typing import NamedTuple

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.opt.task import Task, on_rank
from planner.pool import IntArray

NOBODY = -1
# The even share of a slot is cut into so many levels; the queue ends at TALLEST shares.
LEVELS_A_SHARE = 1024
TALLEST = 8


class Slots(NamedTuple):
    """One-rank slots: seconds of each, who is where, and how many sequences found a place."""

    load: FloatArray
    slot_of: IntArray
    num_placed: int


class _Queue(NamedTuple):
    """Slots by level of load, and parked slots by free tokens: heads of linked lists."""

    by_level: IntArray
    parked: IntArray
    following: IntArray


@kernel
def place_singles(task: Task, sequences: IntArray, num_slots: int, share_s: float) -> Slots:
    """Spread sequences, longest first, over slots. O(sequences + slots + budget).

    Args:
        task: the batch.
        sequences: places in the sorted batch, longest first.
        num_slots: the one-rank slots there are.
        share_s: the even share of load of a slot, about.
    """
    load, used = np.zeros(num_slots), np.zeros(num_slots, np.int64)
    slot_of = np.empty(len(sequences), np.int64)
    if len(sequences) == 0 or num_slots == 0:
        return Slots(load, slot_of, 0)
    lengths, costs, degrees = task.lengths, task.costs, task.degrees
    budget, pad_unit = task.budget, task.pad_unit
    longest_s, longest = on_rank(lengths[sequences[0]], 0, costs, degrees, pad_unit)
    queue = _Queue(
        np.empty(LEVELS_A_SHARE * TALLEST, np.int64),
        np.empty(longest + 1, np.int64),
        np.arange(1, num_slots + 1),
    )
    queue.by_level[:] = NOBODY
    queue.parked[:] = NOBODY
    queue.by_level[0] = 0
    queue.following[num_slots - 1] = NOBODY
    # If every sequence stands out above the others' level, there is no level.
    scale = LEVELS_A_SHARE / max(share_s, longest_s / TALLEST)
    lowest, unparked_to = 0, longest
    for place in range(len(sequences)):
        seconds, tokens = on_rank(lengths[sequences[place]], 0, costs, degrees, pad_unit)
        if tokens < unparked_to:
            lowest = min(lowest, _unpark(queue, tokens, unparked_to, load, scale))
            unparked_to = tokens
        slot, lowest = _lightest(queue, lowest, tokens, used, budget)
        if slot == NOBODY:
            return Slots(load, slot_of, place)
        load[slot] += seconds
        used[slot] += tokens
        slot_of[place] = slot
        _enqueue(queue, slot, load, scale)
    return Slots(load, slot_of, len(sequences))


@kernel
def _lightest(
    queue: _Queue, lowest: int, tokens: int, used: IntArray, budget: int
) -> tuple[int, int]:
    """Take out the lightest slot with enough tokens, parking those without; and its level."""
    while lowest < len(queue.by_level):
        slot = queue.by_level[lowest]
        if slot == NOBODY:
            lowest += 1
            continue
        queue.by_level[lowest] = queue.following[slot]
        free = budget - used[slot]
        if free >= tokens:
            return slot, lowest
        queue.following[slot] = queue.parked[free]
        queue.parked[free] = slot
    return NOBODY, lowest


@kernel
def _unpark(queue: _Queue, tokens: int, below: int, load: FloatArray, scale: float) -> int:
    """Queue the parked slots with `tokens` to below `below` free again; the lowest level seen."""
    lowest = len(queue.by_level)
    for free in range(tokens, below):
        slot = queue.parked[free]
        queue.parked[free] = NOBODY
        while slot != NOBODY:
            following = queue.following[slot]
            lowest = min(lowest, _enqueue(queue, slot, load, scale))
            slot = following
    return lowest


@kernel
def _enqueue(queue: _Queue, slot: int, load: FloatArray, scale: float) -> int:
    # Level 0 is for slots that have nobody: they all get someone first.
    level = min(1 + int(load[slot] * scale), len(queue.by_level) - 1)
    queue.following[slot] = queue.by_level[level]
    queue.by_level[level] = slot
    return level
