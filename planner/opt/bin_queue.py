"""Bins of one degree, lightest first, to one part in LEVELS of the target: a bucket queue.

A list a level of load and the lowest level in use, so that a bin is queued in a few nanoseconds;
an exact heap is a tenth slower on large pools and packs no better.
"""

import numpy as np

from planner.opt.compiled import kernel
from planner.pool import IntArray

LEVELS = 256
NOBODY = -1


@kernel
def new_heads(count: int) -> IntArray:
    """[count, LEVELS + 1] empty queues: the first bin of each level, and last the lowest level."""
    heads = np.empty((count, LEVELS + 1), np.int64)
    heads[:, :LEVELS] = NOBODY
    heads[:, LEVELS] = LEVELS
    return heads


@kernel
def enqueue(heads: IntArray, at: int, following: IntArray, item: int, share: float) -> None:
    """Queue a bin whose load is this share of the target, at most 1."""
    level = min(int(share * LEVELS), LEVELS - 1)
    following[item] = heads[at, level]
    heads[at, level] = item
    heads[at, LEVELS] = min(heads[at, LEVELS], level)


@kernel
def lightest(heads: IntArray, at: int) -> int:
    """A bin of the lowest level, or NOBODY; it stays in the queue."""
    level = heads[at, LEVELS]
    while level < LEVELS and heads[at, level] == NOBODY:
        level += 1
    heads[at, LEVELS] = level
    return heads[at, level] if level < LEVELS else NOBODY


@kernel
def take_out(heads: IntArray, at: int, following: IntArray) -> None:
    """Take out the bin that `lightest` has just named."""
    level = heads[at, LEVELS]
    heads[at, level] = following[heads[at, level]]
