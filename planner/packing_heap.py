"""Piggyback packing with heaps (paper section 5.1.3), compiled: the same bytes as the scan.

Open groups are kept by class (CP degree). A class has two heaps: `by_work`, lightest on top, and
`by_room`, most room on top, for groups that were too full when last looked at. Three facts make
this exact and O(N log G):

- Sequences come longest first, so the tokens a class is asked for never grow: a group once too
  full is looked at again only when the need has shrunk to its room.
- A class opens all its groups before anything piggybacks on it, so its heap is built once.
- After a refusal, the tops of the heaps bound the longest sequence that could still be placed;
  a binary search skips to it. Sequences already placed are skipped by a union-find.

A heap is a tournament: the leaves are the groups by age, every node holds the least key below
it, the root is node 1. A key is (value << bits) | leaf, so ties go to the oldest and one `min` a
level replays a match: 10 ns where a binary heap, whose swaps cannot be predicted, takes 65.
`packing_rules` sees to it that keys fit 63 bits.

State is in two tables with named rows, [rows, K] of groups and [rows, D] of classes: a bundle of
arrays would make numba count references at every access, at half the speed. The file stands
alone because numba's disk cache watches only the file of the entry point.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.packing import Packing, PackingRules
from planner.pool import IntArray
from planner.targets import SMALLEST_SHARD_TOKENS

NOWHERE = -1
ABSENT = np.iinfo(np.int64).max

# Rows of the table of groups: K of its [N] columns are in use, in order of opening.
MICROBATCH, CLASS, WORK, TOKENS, SHORTEST = range(5)

# Rows of the table of classes. The class's groups are FIRST and on, COUNT of them. Its nodes are
# at BASE of the two heaps; its leaves at node LEAVES and on, a power of two of BITS bits (0 until
# something piggybacks on the class).
DEGREE, WORK_LIMIT, FIRST, COUNT, BASE, LEAVES, BITS = range(7)

# Python's lock is let go of: the caller's other threads run while a large batch is packed.
compiled = njit(cache=True, error_model="numpy", nogil=True)


class Limits(NamedTuple):
    """The numbers of `PackingRules`."""

    num_ranks: int
    token_budget: int
    pad_unit: int


def pack_heap(lengths: IntArray, rules: PackingRules) -> Packing:
    """`packing.pack_scan`, in O(N log G).

    Args:
        lengths: [N] lengths, longest first.
        rules: target, budget and legal degrees.
    """
    limits = Limits(rules.num_ranks, rules.token_budget, rules.pad_unit)
    classes, num_nodes = _class_table(rules, len(lengths))
    heaps = np.empty((2, num_nodes), dtype=np.int64)
    groups, sequence_group = _pack(lengths, classes, heaps, limits)
    return Packing(
        num_microbatches=int(groups[MICROBATCH, -1]) + 1,
        group_microbatch=groups[MICROBATCH],
        group_class=groups[CLASS],
        group_work=groups[WORK],
        group_shortest=groups[SHORTEST],
        sequence_group=sequence_group,
    )


def grow_sorted(packing: Packing, rules: PackingRules) -> IntArray:
    """`packing.grow_scan`, in O(K log K + K D).

    The smallest group grows first and joins the next class, so classes are done in turn, each in
    one order, heaviest first: a sort does what the paper's third heap does.
    """
    used = np.bincount(
        packing.group_microbatch,
        weights=rules.degrees[packing.group_class],
        minlength=packing.num_microbatches,
    )
    idle = rules.num_ranks - used.astype(np.int64)
    beside_idle = np.flatnonzero(idle[packing.group_microbatch] > 0)
    heaviest_first = np.argsort(-packing.group_work[beside_idle], kind="stable")
    classes: IntArray = _grow(
        beside_idle[heaviest_first],
        idle,
        packing.group_microbatch,
        packing.group_class,
        packing.group_shortest // SMALLEST_SHARD_TOKENS,
        rules.degrees,
    )
    return classes


def _class_table(rules: PackingRules, num_sequences: int) -> tuple[IntArray, int]:
    """The table of classes, and the nodes a heap needs for all the groups they may open."""
    classes = np.zeros((7, len(rules.degrees)), dtype=np.int64)
    classes[DEGREE] = rules.degrees
    classes[WORK_LIMIT] = rules.work_limits
    most = np.minimum(num_sequences, rules.num_ranks // rules.degrees).tolist()
    nodes = [2 << (groups - 1).bit_length() for groups in most]
    classes[BASE] = np.cumsum([0, *nodes[:-1]])
    return classes, sum(nodes)


@compiled
def _pack(
    lengths: IntArray, classes: IntArray, heaps: IntArray, limits: Limits
) -> tuple[IntArray, IntArray]:
    """The table of groups [5, K] and the group of each sequence [N]."""
    num_sequences = len(lengths)
    groups = np.empty((5, num_sequences), np.int64)
    sequence_group = np.empty(num_sequences, np.int64)
    unplaced = np.arange(num_sequences + 1)
    num_groups, microbatch = 0, 0
    while _next_unplaced(unplaced, 0) < num_sequences:
        opened = num_groups
        num_groups = _fill_microbatch(
            lengths, num_groups, groups, classes, heaps, unplaced, sequence_group, limits
        )
        groups[MICROBATCH, opened:num_groups] = microbatch
        microbatch += 1
    return groups[:, :num_groups].copy(), sequence_group


@compiled
def _fill_microbatch(
    lengths: IntArray,
    num_groups: int,
    groups: IntArray,
    classes: IntArray,
    heaps: IntArray,
    unplaced: IntArray,
    sequence_group: IntArray,
    limits: Limits,
) -> int:
    """Place what fits into one microbatch; return the number of groups now open."""
    by_work, by_room = heaps[0], heaps[1]
    classes[COUNT] = 0
    classes[LEAVES] = 0
    free = limits.num_ranks
    needed = classes.shape[1] - 1
    place = _next_unplaced(unplaced, 0)
    while place < len(lengths):
        length = lengths[place]
        while needed > 0 and _fits_class(length, needed - 1, classes, limits):
            needed -= 1
        if classes[DEGREE, needed] <= free:
            group = num_groups
            _open(group, length, needed, groups, classes, limits)
            num_groups += 1
            free -= classes[DEGREE, needed]
        else:
            group = _piggyback(length, needed, groups, classes, by_work, by_room, limits)
        if group == NOWHERE:
            longest = _longest_admissible(free, classes, by_work, by_room, limits)
            place = _next_unplaced(unplaced, _first_within(lengths, longest, place + 1))
        else:
            sequence_group[place] = group
            unplaced[place] = place + 1
            place = _next_unplaced(unplaced, place + 1)
    return num_groups


@compiled
def _next_unplaced(unplaced: IntArray, place: int) -> int:
    """The first place at or after `place` that waits; paths are halved on the way."""
    while unplaced[place] != place:
        unplaced[place] = unplaced[unplaced[place]]
        place = unplaced[place]
    return place


@compiled
def _first_within(lengths: IntArray, longest: int, low: int) -> int:
    """The first place at or after `low` whose length is at most `longest`."""
    high = len(lengths)
    while low < high:
        middle = (low + high) // 2
        if lengths[middle] <= longest:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _tokens_per_rank(length: int, degree: int, limits: Limits) -> int:
    unit = limits.pad_unit * degree
    return (length + unit - 1) // unit * limits.pad_unit


@compiled
def _fits_class(length: int, c: int, classes: IntArray, limits: Limits) -> bool:
    if length * length > classes[WORK_LIMIT, c]:
        return False
    return bool(_tokens_per_rank(length, classes[DEGREE, c], limits) <= limits.token_budget)


@compiled
def _open(
    group: int, length: int, c: int, groups: IntArray, classes: IntArray, limits: Limits
) -> None:
    """Open a group for a sequence. Lengths fall, so the ids of a class are consecutive."""
    groups[CLASS, group] = c
    groups[WORK, group] = length * length
    groups[TOKENS, group] = _tokens_per_rank(length, classes[DEGREE, c], limits)
    groups[SHORTEST, group] = length
    if classes[COUNT, c] == 0:
        classes[FIRST, c] = group
    classes[COUNT, c] += 1


@compiled
def _piggyback(
    length: int,
    needed: int,
    groups: IntArray,
    classes: IntArray,
    by_work: IntArray,
    by_room: IntArray,
    limits: Limits,
) -> int:
    """Join the lightest feasible group of the smallest class that has one, or go NOWHERE."""
    for c in range(needed, classes.shape[1]):
        if classes[COUNT, c] == 0:
            continue
        if classes[LEAVES, c] == 0:
            _build(c, groups, classes, by_work, by_room)
        tokens = _tokens_per_rank(length, classes[DEGREE, c], limits)
        most_tokens = limits.token_budget - tokens
        most_work = classes[WORK_LIMIT, c] - length * length
        leaf = _lightest(most_work, most_tokens, c, groups, classes, by_work, by_room)
        if leaf != NOWHERE:
            group: int = classes[FIRST, c] + leaf
            groups[WORK, group] += length * length
            groups[TOKENS, group] += tokens
            groups[SHORTEST, group] = length
            key = (groups[WORK, group] << classes[BITS, c]) | leaf
            _replay(by_work, classes[BASE, c], classes[LEAVES, c] + leaf, key)
            return group
    return NOWHERE


@compiled
def _lightest(
    most_work: int,
    most_tokens: int,
    c: int,
    groups: IntArray,
    classes: IntArray,
    by_work: IntArray,
    by_room: IntArray,
) -> int:
    """The leaf of the lightest group with room, or NOWHERE if it is too heavy.

    Groups come back from `by_room` when they have room; the too full leave `by_work` for it.
    """
    first, base, bits = classes[FIRST, c], classes[BASE, c], classes[BITS, c]
    leaves, root = classes[LEAVES, c], classes[BASE, c] + 1
    while by_room[root] >> bits <= most_tokens:
        leaf: int = by_room[root] & (leaves - 1)
        _replay(by_room, base, leaves + leaf, ABSENT)
        _replay(by_work, base, leaves + leaf, (groups[WORK, first + leaf] << bits) | leaf)
    while by_work[root] >> bits <= most_work:
        leaf = by_work[root] & (leaves - 1)
        tokens = groups[TOKENS, first + leaf]
        if tokens <= most_tokens:
            return leaf
        _replay(by_work, base, leaves + leaf, ABSENT)
        _replay(by_room, base, leaves + leaf, (tokens << bits) | leaf)
    return NOWHERE


@compiled
def _build(
    c: int, groups: IntArray, classes: IntArray, by_work: IntArray, by_room: IntArray
) -> None:
    """Seat every group of the class in `by_work`, none in `by_room`."""
    first, count, base = classes[FIRST, c], classes[COUNT, c], classes[BASE, c]
    leaves, bits = 1, 0
    while leaves < count:
        leaves, bits = 2 * leaves, bits + 1
    classes[LEAVES, c], classes[BITS, c] = leaves, bits
    by_room[base : base + 2 * leaves] = ABSENT
    by_work[base : base + 2 * leaves] = ABSENT
    for leaf in range(count):
        by_work[base + leaves + leaf] = (groups[WORK, first + leaf] << bits) | leaf
    for node in range(leaves - 1, 0, -1):
        by_work[base + node] = min(by_work[base + 2 * node], by_work[base + 2 * node + 1])


@compiled
def _replay(heap: IntArray, base: int, node: int, key: int) -> None:
    """Give a leaf a new key and play its matches up to the root."""
    heap[base + node] = key
    while node > 1:
        key = min(key, heap[base + (node ^ 1)])
        node >>= 1
        heap[base + node] = key


@compiled
def _longest_admissible(
    free: int, classes: IntArray, by_work: IntArray, by_room: IntArray, limits: Limits
) -> int:
    """No sequence longer than this can be placed in the microbatch any more.

    A refusal has just looked at every class that has groups, so all are built and their tops in
    order. Every bound is below the length refused, so each refusal skips ahead.
    """
    longest = 0
    for c in range(classes.shape[1]):
        degree, work_limit = classes[DEGREE, c], classes[WORK_LIMIT, c]
        widest = _longest_of(limits.token_budget, degree, limits)
        if degree <= free:
            longest = max(longest, min(_square_root(work_limit), widest))
        if classes[COUNT, c] == 0:
            continue
        lightest, emptiest = by_work[classes[BASE, c] + 1], by_room[classes[BASE, c] + 1]
        if lightest != ABSENT:
            light = _square_root(work_limit - (lightest >> classes[BITS, c]))
            longest = max(longest, min(light, widest))
        if emptiest != ABSENT:
            room = limits.token_budget - (emptiest >> classes[BITS, c])
            longest = max(longest, _longest_of(room, degree, limits))
    return longest


@compiled
def _longest_of(tokens: int, degree: int, limits: Limits) -> int:
    """The longest sequence that puts at most `tokens` on each of `degree` ranks."""
    return tokens // limits.pad_unit * limits.pad_unit * degree


@compiled
def _square_root(value: int) -> int:
    """The whole square root, exactly: a bound that is one too high would rescan equal lengths."""
    if value <= 0:
        return 0
    root = int(np.sqrt(value))
    while root * root > value:
        root -= 1
    while (root + 1) * (root + 1) <= value:
        root += 1
    return root


@compiled
def _grow(
    order: IntArray,
    idle: IntArray,
    group_microbatch: IntArray,
    group_class: IntArray,
    group_most_ranks: IntArray,
    degrees: IntArray,
) -> IntArray:
    """Classes [K] after growing, in the order given; uses `idle` [MBs] up."""
    classes = group_class.copy()
    for c in range(len(degrees) - 1):
        extra = degrees[c + 1] - degrees[c]
        for group in order:
            microbatch = group_microbatch[group]
            can_be_cut = group_most_ranks[group] >= degrees[c + 1]
            if classes[group] == c and can_be_cut and extra <= idle[microbatch]:
                classes[group] += 1
                idle[microbatch] -= extra
    return classes
