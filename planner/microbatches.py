"""Make the MB count one that the pipeline's schedule accepts, by halving microbatches."""

from dataclasses import replace

import numpy as np
from numba import njit

from planner.packing import Packing
from planner.pool import IntArray, PoolShape


def with_legal_count(packing: Packing, lengths: IntArray, pool: PoolShape) -> Packing:
    """Halve microbatches until their number is legal. O(splits x N).

    The microbatch with the most sequences (ties: earliest) is halved by sequences: each of its
    groups deals its sequences in turn between the two halves, so a group of many leaves a group
    of the same width and half the load in both, no sequence is cut finer, and what idles is
    grown afterwards. Where no microbatch has two sequences, empty ones are added.

    Args:
        packing: groups in any number of MBs.
        lengths: [N] lengths, longest first.
        pool: knows the legal counts.
    """
    wanted = pool.legal_num_microbatches(packing.num_microbatches)
    while packing.num_microbatches < wanted:
        microbatch_of_sequence = packing.group_microbatch[packing.sequence_group]
        counts = np.bincount(microbatch_of_sequence, minlength=packing.num_microbatches)
        crowded = int(counts.argmax())
        if counts[crowded] < 2:
            return replace(packing, num_microbatches=wanted)
        packing = _halve(packing, lengths, crowded)
    return packing


def _halve(packing: Packing, lengths: IntArray, microbatch: int) -> Packing:
    columns = _deal(
        lengths,
        microbatch,
        packing.group_microbatch,
        packing.group_class,
        packing.sequence_group,
    )
    group_microbatch, group_class, group_work, group_shortest, sequence_group = columns
    return Packing(
        num_microbatches=packing.num_microbatches + 1,
        group_microbatch=group_microbatch,
        group_class=group_class,
        group_work=group_work,
        group_shortest=group_shortest,
        sequence_group=sequence_group,
    )


@njit(cache=True)
def _deal(
    lengths: IntArray,
    microbatch: int,
    group_microbatch: IntArray,
    group_class: IntArray,
    sequence_group: IntArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Deal microbatch m into m and m + 1; later ones move up by one.

    Groups take turns at which half they stay in; a group's second, fourth, ... sequence goes to
    its twin in the other half, which is opened when first needed.
    """
    num_groups = len(group_class)
    microbatches = np.empty(2 * num_groups, np.int64)
    classes = np.empty(2 * num_groups, np.int64)
    twin = np.full(num_groups, -1)
    turn = 0
    for group in range(num_groups):
        here = group_microbatch[group] == microbatch
        microbatches[group] = group_microbatch[group] + (group_microbatch[group] > microbatch)
        classes[group] = group_class[group]
        if here:
            microbatches[group] += turn
            turn = 1 - turn
    stays = np.ones(num_groups, np.bool_)
    groups_of_sequences = sequence_group.copy()
    for place in range(len(lengths)):
        group = sequence_group[place]
        if group_microbatch[group] != microbatch:
            continue
        if not stays[group]:
            if twin[group] < 0:
                twin[group] = num_groups
                microbatches[num_groups] = 2 * microbatch + 1 - microbatches[group]
                classes[num_groups] = group_class[group]
                num_groups += 1
            groups_of_sequences[place] = twin[group]
        stays[group] = not stays[group]
    work = np.zeros(num_groups, np.int64)
    shortest = np.zeros(num_groups, np.int64)
    for place in range(len(lengths)):
        group = groups_of_sequences[place]
        work[group] += lengths[place] * lengths[place]
        shortest[group] = lengths[place]
    return (
        microbatches[:num_groups].copy(),
        classes[:num_groups].copy(),
        work,
        shortest,
        groups_of_sequences,
    )
