"""Checks on the lengths a planner is given, and their order: longest first, ties by place."""

import numpy as np
import numpy.typing as npt
from numba import njit

from planner.errors import InfeasibleError, InputError
from planner.pool import IntArray, PoolShape

DIGIT_BITS = 11
DIGIT_MASK = (1 << DIGIT_BITS) - 1


def checked_lengths(lengths: npt.ArrayLike, pool: PoolShape) -> IntArray:
    """A copy of the lengths as [N] int64, once each is known to fit the pool. O(N).

    A copy, as the plan keeps it: what the caller does with theirs must not change a plan.

    Raises:
        InputError: not one axis, not whole numbers, or not above zero.
        InfeasibleError: a sequence is longer than all ranks together hold.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise InputError(
            "Lengths must have one axis", value=f"{array.ndim} axes", remedy="Pass a flat array."
        )
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise InputError(
            "Lengths must be whole numbers",
            value=f"dtype {array.dtype}",
            limit="an integer dtype",
            remedy="Convert the lengths to integers first.",
        )
    whole = array.astype(np.int64)
    _check_range(whole, pool)
    return whole


def longest_first(lengths: IntArray) -> IntArray:
    """[N] places by falling length, equal lengths by rising place. O(N), see `_radix_sort`."""
    if lengths.size == 0:
        return np.zeros(0, dtype=np.int64)
    shortfalls = lengths.max() - lengths
    places: IntArray = _radix_sort(shortfalls, int(shortfalls.max()))
    return places


@njit(cache=True, error_model="numpy")
def _radix_sort(keys: IntArray, largest: int) -> IntArray:
    """A stable argsort of whole keys >= 0, by digits from the least significant one up.

    Two passes order lengths up to 4M, several times faster than a comparison sort of packed
    integers where numpy has no vectorised one for the machine.
    """
    places = np.arange(len(keys))
    scratch = np.empty_like(places)
    shift = 0
    while shift == 0 or largest >> shift > 0:
        starts = np.zeros((1 << DIGIT_BITS) + 1, np.int64)
        for key in keys:
            starts[((key >> shift) & DIGIT_MASK) + 1] += 1
        starts = np.cumsum(starts)
        for place in places:
            digit = (keys[place] >> shift) & DIGIT_MASK
            scratch[starts[digit]] = place
            starts[digit] += 1
        places, scratch = scratch, places
        shift += DIGIT_BITS
    return places


def _check_range(lengths: IntArray, pool: PoolShape) -> None:
    if lengths.min() <= 0:
        place = int(lengths.argmin())
        raise InputError(
            f"The sequence at place {place} has no tokens",
            value=int(lengths[place]),
            limit=">= 1",
            remedy="Drop empty sequences.",
        )
    limit = min(pool.longest_sequence, 2**31 - 1)
    if lengths.max() <= limit:
        return
    place = int(lengths.argmax())
    degree = pool.degrees[-1]
    enough = -(-int(lengths[place]) // (pool.pad_unit * degree)) * pool.pad_unit
    raise InfeasibleError(
        f"The sequence at place {place} does not fit {degree} ranks of "
        f"{pool.token_budget} tokens each",
        value=f"{int(lengths[place])} tokens",
        limit=f"{limit} tokens",
        remedy=f"Split or drop it, add ranks, or raise the token budget to at least {enough}.",
    )
