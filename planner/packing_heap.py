"""Piggyback packing with heaps (paper section 5.1.3), compiled: the same bytes as the scan.

Open groups are kept by class (CP degree). A class has two heaps: `by_work`, lightest first, and
`by_room`, most room first, for groups that were too full when last looked at. Three facts make
this exact and O(N log G):

- Sequences come longest first, so the tokens a class is asked for never grow: a group once too
  full is looked at again only when the need has shrunk to its room.
- A class opens all its groups before anything piggybacks on it, so its heap is built once.
- After a refusal, the tops of the heaps bound the longest sequence that could still be placed;
  a binary search skips to it. Sequences already placed are skipped by a union-find.

This file is compiled as one: numba's disk cache watches only the file of the entry point.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.packing import SMALLEST_SHARD_TOKENS, Packing, PackingRules
from planner.pool import IntArray

NOWHERE = -1


class Rules(NamedTuple):
    """`PackingRules` in a form that numba takes."""

    degrees: IntArray
    work_limits: IntArray
    num_ranks: int
    token_budget: int
    pad_unit: int


class Groups(NamedTuple):
    """All groups, in order of opening: K of [N] entries are in use."""

    microbatch: IntArray
    degree_class: IntArray
    work: IntArray
    tokens: IntArray
    shortest: IntArray


class Queues(NamedTuple):
    """Two heaps of group ids a class, in rows [class, entry], and how many each holds."""

    by_work: IntArray
    num_by_work: IntArray
    by_room: IntArray
    num_by_room: IntArray
    is_heap: IntArray


def pack_heap(lengths: IntArray, rules: PackingRules) -> Packing:
    """`packing.pack_scan`, in O(N log G).

    Args:
        lengths: [N] lengths, longest first.
        rules: target, budget and legal degrees.
    """
    num_microbatches, groups, sequence_group = _pack(lengths, _compilable(rules))
    microbatch, degree_class, work, shortest = groups
    return Packing(
        num_microbatches=num_microbatches,
        group_microbatch=microbatch,
        group_class=degree_class,
        group_work=work,
        group_shortest=shortest,
        sequence_group=sequence_group,
    )


def grow_heap(packing: Packing, rules: PackingRules) -> IntArray:
    """`packing.grow_scan`, in O(K log K)."""
    return _grow(
        packing.num_microbatches,
        packing.group_microbatch,
        packing.group_class,
        packing.group_work,
        packing.group_shortest,
        _compilable(rules),
    )


def _compilable(rules: PackingRules) -> Rules:
    return Rules(
        rules.degrees, rules.work_limits, rules.num_ranks, rules.token_budget, rules.pad_unit
    )


@njit(cache=True)
def _pack(
    lengths: IntArray, rules: Rules
) -> tuple[int, tuple[IntArray, IntArray, IntArray, IntArray], IntArray]:
    num_sequences = len(lengths)
    groups = Groups(
        np.empty(num_sequences, np.int64),
        np.empty(num_sequences, np.int64),
        np.empty(num_sequences, np.int64),
        np.empty(num_sequences, np.int64),
        np.empty(num_sequences, np.int64),
    )
    sequence_group = np.empty(num_sequences, np.int64)
    unplaced = np.arange(num_sequences + 1)
    queues = _new_queues(min(num_sequences, rules.num_ranks), rules)
    num_groups = 0
    num_microbatches = 0
    while _next_unplaced(unplaced, 0) < num_sequences:
        opened = num_groups
        num_groups = _fill_microbatch(
            lengths, rules, groups, num_groups, queues, unplaced, sequence_group
        )
        groups.microbatch[opened:num_groups] = num_microbatches
        num_microbatches += 1
    columns = (
        groups.microbatch[:num_groups].copy(),
        groups.degree_class[:num_groups].copy(),
        groups.work[:num_groups].copy(),
        groups.shortest[:num_groups].copy(),
    )
    return num_microbatches, columns, sequence_group


@njit(cache=True)
def _new_queues(most_groups: int, rules: Rules) -> Queues:
    num_classes = len(rules.degrees)
    return Queues(
        np.empty((num_classes, most_groups), np.int64),
        np.zeros(num_classes, np.int64),
        np.empty((num_classes, most_groups), np.int64),
        np.zeros(num_classes, np.int64),
        np.zeros(num_classes, np.int64),
    )


@njit(cache=True)
def _fill_microbatch(
    lengths: IntArray,
    rules: Rules,
    groups: Groups,
    num_groups: int,
    queues: Queues,
    unplaced: IntArray,
    sequence_group: IntArray,
) -> int:
    """Place what fits into one microbatch; return the number of groups now open."""
    queues.num_by_work[:] = 0
    queues.num_by_room[:] = 0
    queues.is_heap[:] = 0
    free = rules.num_ranks
    needed = len(rules.degrees) - 1
    place = _next_unplaced(unplaced, 0)
    while place < len(lengths):
        length = lengths[place]
        while needed > 0 and _fits_class(length, needed - 1, rules):
            needed -= 1
        if rules.degrees[needed] <= free:
            group = num_groups
            _open(group, needed, groups, queues)
            num_groups += 1
            free -= rules.degrees[needed]
            _add(group, length, groups, rules)
        else:
            group = _piggyback(length, needed, groups, queues, rules)
        if group == NOWHERE:
            longest = _longest_admissible(free, groups, queues, rules)
            place = _next_unplaced(unplaced, _first_within(lengths, longest, place + 1))
        else:
            sequence_group[place] = group
            unplaced[place] = place + 1
            place = _next_unplaced(unplaced, place + 1)
    return num_groups


@njit(cache=True)
def _next_unplaced(unplaced: IntArray, place: int) -> int:
    """The first place at or after `place` that waits; paths are halved on the way."""
    while unplaced[place] != place:
        unplaced[place] = unplaced[unplaced[place]]
        place = unplaced[place]
    return place


@njit(cache=True)
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


@njit(cache=True)
def _tokens_per_rank(length: int, degree_class: int, rules: Rules) -> int:
    unit = rules.pad_unit * rules.degrees[degree_class]
    return (length + unit - 1) // unit * rules.pad_unit


@njit(cache=True)
def _fits_class(length: int, degree_class: int, rules: Rules) -> bool:
    if length * length > rules.work_limits[degree_class]:
        return False
    return _tokens_per_rank(length, degree_class, rules) <= rules.token_budget


@njit(cache=True)
def _open(group: int, degree_class: int, groups: Groups, queues: Queues) -> None:
    """Append to the class; ids rise, and the heap is built at the first piggyback."""
    groups.degree_class[group] = degree_class
    groups.work[group] = 0
    groups.tokens[group] = 0
    queues.by_work[degree_class, queues.num_by_work[degree_class]] = group
    queues.num_by_work[degree_class] += 1


@njit(cache=True)
def _add(group: int, length: int, groups: Groups, rules: Rules) -> None:
    groups.work[group] += length * length
    groups.tokens[group] += _tokens_per_rank(length, groups.degree_class[group], rules)
    groups.shortest[group] = length


@njit(cache=True)
def _piggyback(length: int, needed: int, groups: Groups, queues: Queues, rules: Rules) -> int:
    """Join the lightest feasible group of the smallest class that has one, or go NOWHERE."""
    for degree_class in range(needed, len(rules.degrees)):
        group = _lightest_with_room(length, degree_class, groups, queues, rules)
        if group != NOWHERE:
            _add(group, length, groups, rules)
            size = queues.num_by_work[degree_class]
            _sink(queues.by_work[degree_class], size, 0, groups.work)
            return group
    return NOWHERE


@njit(cache=True)
def _lightest_with_room(
    length: int, degree_class: int, groups: Groups, queues: Queues, rules: Rules
) -> int:
    """The top of `by_work` once those without room are set aside; NOWHERE if it is too heavy."""
    by_work, by_room = queues.by_work[degree_class], queues.by_room[degree_class]
    if not queues.is_heap[degree_class]:
        _heapify(by_work, queues.num_by_work[degree_class], groups.work)
        queues.is_heap[degree_class] = 1
    most_tokens = rules.token_budget - _tokens_per_rank(length, degree_class, rules)
    while queues.num_by_room[degree_class] > 0 and groups.tokens[by_room[0]] <= most_tokens:
        group = _pop(by_room, queues.num_by_room, degree_class, groups.tokens)
        _push(by_work, queues.num_by_work, degree_class, group, groups.work)
    most_work = rules.work_limits[degree_class] - length * length
    while queues.num_by_work[degree_class] > 0:
        group = by_work[0]
        if groups.work[group] > most_work:
            return NOWHERE
        if groups.tokens[group] <= most_tokens:
            return group
        _pop(by_work, queues.num_by_work, degree_class, groups.work)
        _push(by_room, queues.num_by_room, degree_class, group, groups.tokens)
    return NOWHERE


@njit(cache=True)
def _longest_admissible(free: int, groups: Groups, queues: Queues, rules: Rules) -> int:
    """No sequence longer than this can be placed in the microbatch any more.

    A refusal has just looked at every class that has groups, so all are heaps with their tops in
    order. Every bound is below the length refused, so each refusal skips ahead.
    """
    longest = 0
    for degree_class in range(len(rules.degrees)):
        degree, limit = rules.degrees[degree_class], rules.work_limits[degree_class]
        if degree <= free:
            alone = min(_square_root(limit), _longest_of(rules.token_budget, degree, rules))
            longest = max(longest, alone)
        if queues.num_by_work[degree_class] > 0:
            light = _square_root(limit - groups.work[queues.by_work[degree_class, 0]])
            longest = max(longest, min(light, _longest_of(rules.token_budget, degree, rules)))
        if queues.num_by_room[degree_class] > 0:
            tokens = groups.tokens[queues.by_room[degree_class, 0]]
            longest = max(longest, _longest_of(rules.token_budget - tokens, degree, rules))
    return longest


@njit(cache=True)
def _longest_of(tokens: int, degree: int, rules: Rules) -> int:
    """The longest sequence that puts at most `tokens` on each of `degree` ranks."""
    return tokens // rules.pad_unit * rules.pad_unit * degree


@njit(cache=True)
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


@njit(cache=True)
def _heapify(heap: IntArray, size: int, keys: IntArray) -> None:
    for entry in range(size // 2 - 1, -1, -1):
        _sink(heap, size, entry, keys)


@njit(cache=True)
def _sink(heap: IntArray, size: int, entry: int, keys: IntArray) -> None:
    """Move an entry down to its place: smallest (key, id) on top."""
    group = heap[entry]
    key = keys[group]
    child = 2 * entry + 1
    while child < size:
        if child + 1 < size and _is_before(heap[child + 1], heap[child], keys):
            child += 1
        below = heap[child]
        if keys[below] > key or (keys[below] == key and below > group):
            break
        heap[entry] = below
        entry = child
        child = 2 * entry + 1
    heap[entry] = group


@njit(cache=True)
def _is_before(group: int, other: int, keys: IntArray) -> bool:
    return keys[group] < keys[other] or (keys[group] == keys[other] and group < other)


@njit(cache=True)
def _push(heap: IntArray, sizes: IntArray, row: int, group: int, keys: IntArray) -> None:
    entry = sizes[row]
    sizes[row] += 1
    while entry > 0 and _is_before(group, heap[(entry - 1) // 2], keys):
        heap[entry] = heap[(entry - 1) // 2]
        entry = (entry - 1) // 2
    heap[entry] = group


@njit(cache=True)
def _pop(heap: IntArray, sizes: IntArray, row: int, keys: IntArray) -> int:
    top = heap[0]
    sizes[row] -= 1
    if sizes[row] > 0:
        heap[0] = heap[sizes[row]]
        _sink(heap, sizes[row], 0, keys)
    return top


@njit(cache=True)
def _grow(
    num_microbatches: int,
    group_microbatch: IntArray,
    group_class: IntArray,
    group_work: IntArray,
    group_shortest: IntArray,
    rules: Rules,
) -> IntArray:
    classes = group_class.copy()
    first, by_microbatch = _groups_by_microbatch(num_microbatches, group_microbatch)
    heaviest_first = -group_work
    heap = np.empty(len(classes), np.int64)
    for microbatch in range(num_microbatches):
        members = by_microbatch[first[microbatch] : first[microbatch + 1]]
        idle = rules.num_ranks
        for group in members:
            idle -= rules.degrees[classes[group]]
        for degree_class in range(len(rules.degrees) - 1):
            if idle == 0:
                break
            shard = SMALLEST_SHARD_TOKENS * rules.degrees[degree_class + 1]
            extra = rules.degrees[degree_class + 1] - rules.degrees[degree_class]
            size = np.zeros(1, np.int64)
            for group in members:
                if classes[group] == degree_class and group_shortest[group] >= shard:
                    _push(heap, size, 0, group, heaviest_first)
            while size[0] > 0 and extra <= idle:
                classes[_pop(heap, size, 0, heaviest_first)] += 1
                idle -= extra
    return classes


@njit(cache=True)
def _groups_by_microbatch(
    num_microbatches: int, group_microbatch: IntArray
) -> tuple[IntArray, IntArray]:
    """Offsets [MBs + 1] and group ids [K] by microbatch: halving had appended some at the end."""
    first = np.zeros(num_microbatches + 1, np.int64)
    for microbatch in group_microbatch:
        first[microbatch + 1] += 1
    first = np.cumsum(first)
    cursor = first[:-1].copy()
    by_microbatch = np.empty(len(group_microbatch), np.int64)
    for group in range(len(group_microbatch)):
        by_microbatch[cursor[group_microbatch[group]]] = group
        cursor[group_microbatch[group]] += 1
    return first, by_microbatch
