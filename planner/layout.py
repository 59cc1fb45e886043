"""Give groups their ranks: in every microbatch by falling size, which aligns all of them."""

import numpy as np
from numba import njit

from planner.cost import CostTable
from planner.packing import Packing
from planner.plan import Plan
from planner.pool import IntArray, PoolShape


def lay_out(
    planner: str,
    packing: Packing,
    places: IntArray,
    lengths: IntArray,
    pool: PoolShape,
    table: CostTable,
    target: float,
) -> Plan:
    """Turn groups into a plan. O(K log K + N).

    Within a microbatch a power of two that follows only larger powers of two starts at a
    multiple of itself, and a group of all G ranks stands alone, so no rank is lost to alignment.

    Args:
        planner: name for the plan.
        packing: K groups over sequences sorted longest first.
        places: [N] place in the batch of each sorted sequence.
        lengths: [N] lengths in batch order.
        pool: the pool.
        table: degrees and their Ulysses factor.
        target: the load that was steered to.
    """
    order = _group_order(packing)
    microbatch, classes = packing.group_microbatch[order], packing.group_class[order]
    sizes = table.degrees[classes]
    offsets, members = _gather_members(order, packing.sequence_group, places)
    return Plan(
        planner=planner,
        pool=pool,
        num_microbatches=packing.num_microbatches,
        lengths=lengths,
        group_microbatch=microbatch,
        group_start=first_ranks(microbatch, sizes),
        group_size=sizes,
        group_ulysses=table.ulysses[classes],
        group_offsets=offsets,
        members=members,
        target_s=target,
    )


def first_ranks(group_microbatch: IntArray, group_size: IntArray) -> IntArray:
    """[K] the first rank of each group when every microbatch is filled from rank 0 up."""
    before = np.cumsum(group_size) - group_size
    opens = np.flatnonzero(np.diff(group_microbatch, prepend=-1))
    groups_of_microbatch = np.diff(opens, append=len(group_size))
    first: IntArray = before - np.repeat(before[opens], groups_of_microbatch)
    return first


def _group_order(packing: Packing) -> IntArray:
    """[K] groups by microbatch, then falling size, then age: one sort of packed integers."""
    widest = int(packing.group_class.max(initial=0))
    keys = packing.group_microbatch << 40
    keys |= (widest - packing.group_class) << 32
    keys |= np.arange(len(keys), dtype=np.int64)
    keys.sort()
    keys &= 0xFFFFFFFF
    return keys


@njit(cache=True)
def _gather_members(
    order: IntArray, sequence_group: IntArray, places: IntArray
) -> tuple[IntArray, IntArray]:
    """Offsets [K + 1] and members [N] of the reordered groups: a counting sort."""
    position = np.empty(len(order), np.int64)
    for at in range(len(order)):
        position[order[at]] = at
    offsets = np.zeros(len(order) + 1, np.int64)
    for group in sequence_group:
        offsets[position[group] + 1] += 1
    for at in range(len(order)):
        offsets[at + 1] += offsets[at]
    cursor = offsets[:-1].copy()
    members = np.empty(len(places), np.int64)
    for at in range(len(places)):
        group = position[sequence_group[at]]
        members[cursor[group]] = places[at]
        cursor[group] += 1
    return offsets, members
