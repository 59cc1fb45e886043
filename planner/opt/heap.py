"""Min-heaps of bins by load: entry 0 of a heap is its size, entry 1 its lightest bin."""

import numpy as np

from planner.cost import FloatArray
from planner.opt.compiled import kernel
from planner.pool import IntArray


@kernel
def new_heaps(count: int, capacity: int) -> IntArray:
    """[count, capacity + 1] empty heaps."""
    heaps = np.empty((count, capacity + 1), np.int64)
    heaps[:, 0] = 0
    return heaps


@kernel
def push(heap: IntArray, item: int, load: FloatArray) -> None:
    """Add a bin. O(log size)."""
    heap[0] += 1
    at = heap[0]
    while at > 1 and load[item] < load[heap[at // 2]]:
        heap[at] = heap[at // 2]
        at //= 2
    heap[at] = item


@kernel
def sink(heap: IntArray, load: FloatArray) -> None:
    """Restore the order after the lightest bin has grown. O(log size)."""
    size, item, at = heap[0], heap[1], 1
    while 2 * at <= size:
        child = 2 * at
        if child < size and load[heap[child + 1]] < load[heap[child]]:
            child += 1
        if load[item] <= load[heap[child]]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item
