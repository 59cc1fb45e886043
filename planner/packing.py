"""Piggyback packing (paper section 5.1.2, Algorithm 1) as a plain scan: the specification.

`packing_heap` makes the same plan to the byte, faster. Work is counted in whole squared tokens
(s^2 of every sequence of a group; load = work / size), so no rounding can part the two.
"""

from dataclasses import dataclass

import numpy as np

from planner.errors import InputError
from planner.pool import IntArray, PoolShape
from planner.targets import SMALLEST_SHARD_TOKENS, Targets

MOST_WORK = 2**61


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """What packing must keep, one entry a legal degree: D degrees, ascending.

    Args:
        degrees: [D] legal CP degrees; the last is the largest.
        work_limits: [D] the most squared tokens a group of that degree may take.
        num_ranks: G.
        token_budget: B, padded tokens a rank.
        pad_unit: a sequence of degree k is padded to a multiple of pad_unit * k.
    """

    degrees: IntArray
    work_limits: IntArray
    num_ranks: int
    token_budget: int
    pad_unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Groups before they have ranks: K groups in order of opening, N sequences longest first.

    Args:
        num_microbatches: MBs used so far.
        group_microbatch: [K] the MB of each group.
        group_class: [K] the index of its degree in `PackingRules.degrees`.
        group_work: [K] squared tokens of its sequences.
        group_shortest: [K] the length of its shortest sequence.
        sequence_group: [N] the group of each sequence.
    """

    num_microbatches: int
    group_microbatch: IntArray
    group_class: IntArray
    group_work: IntArray
    group_shortest: IntArray
    sequence_group: IntArray


@dataclass(slots=True)
class OpenGroup:
    """A group of the microbatch being filled; `tokens` are padded tokens on each rank."""

    index: int
    degree_class: int
    work: int
    tokens: int
    shortest: int


def packing_rules(targets: Targets, longest: int, pool: PoolShape) -> PackingRules:
    """Turn a load target into whole work limits; rounding never keeps the longest out.

    Raises:
        InputError: squared tokens of this pool do not fit the heaps' 63-bit keys. The target is
            at most longest * B, so longest * B * G below 2^60 always fits.
    """
    limits = [int(targets.load * k) for k in pool.degrees]
    limits = [
        max(limit, longest**2) if k >= targets.cap else limit
        for limit, k in zip(limits, pool.degrees, strict=True)
    ]
    # A heap's key is the work followed by the number of a group among at most G / k.
    most = max(limit * (pool.num_ranks // k) for limit, k in zip(limits, pool.degrees, strict=True))
    if most >= MOST_WORK:
        raise InputError(
            "The pool is too large for its longest sequence",
            value=f"{longest} tokens in {pool.num_ranks} ranks of {pool.token_budget}",
            limit="2^60 for the product of the three",
            remedy="Lower the token budget.",
        )
    return PackingRules(
        degrees=np.array(pool.degrees, dtype=np.int64),
        work_limits=np.array(limits, dtype=np.int64),
        num_ranks=pool.num_ranks,
        token_budget=pool.token_budget,
        pad_unit=pool.pad_unit,
    )


def tokens_per_rank(length: int, degree_class: int, rules: PackingRules) -> int:
    """Padded tokens a sequence puts on each rank of its group."""
    unit = rules.pad_unit
    return -(-length // (unit * int(rules.degrees[degree_class]))) * unit


def needed_class(length: int, rules: PackingRules) -> int:
    """cp(s): the class of the least degree at which s alone keeps the target and the budget."""
    for degree_class in range(len(rules.degrees)):
        light = length * length <= rules.work_limits[degree_class]
        if light and tokens_per_rank(length, degree_class, rules) <= rules.token_budget:
            return degree_class
    raise AssertionError("checked_lengths lets no such sequence through")


def pack_scan(lengths: IntArray, rules: PackingRules) -> Packing:
    """Fill one microbatch after the other until every sequence has a group. O(N G) a microbatch.

    Args:
        lengths: [N] lengths, longest first.
        rules: target, budget and legal degrees.
    """
    sequence_group = np.zeros(len(lengths), dtype=np.int64)
    groups: list[OpenGroup] = []
    group_microbatch: list[int] = []
    remaining = list(range(len(lengths)))
    num_microbatches = 0
    while remaining:
        opened = len(groups)
        remaining = _fill_microbatch(remaining, lengths, rules, groups, sequence_group)
        group_microbatch += [num_microbatches] * (len(groups) - opened)
        num_microbatches += 1
    return Packing(
        num_microbatches=num_microbatches,
        group_microbatch=np.array(group_microbatch, dtype=np.int64),
        group_class=np.array([g.degree_class for g in groups], dtype=np.int64),
        group_work=np.array([g.work for g in groups], dtype=np.int64),
        group_shortest=np.array([g.shortest for g in groups], dtype=np.int64),
        sequence_group=sequence_group,
    )


def _fill_microbatch(
    remaining: list[int],
    lengths: IntArray,
    rules: PackingRules,
    groups: list[OpenGroup],
    sequence_group: IntArray,
) -> list[int]:
    """Place what fits, longest first; return what must wait for a later microbatch."""
    first, free, waiting = len(groups), rules.num_ranks, []
    for place in remaining:
        length = int(lengths[place])
        needed = needed_class(length, rules)
        if rules.degrees[needed] <= free:
            group = OpenGroup(len(groups), needed, 0, 0, length)
            groups.append(group)
            free -= int(rules.degrees[needed])
        else:
            feasible = [g for g in groups[first:] if _admits(g, length, needed, rules)]
            if not feasible:
                waiting.append(place)
                continue
            group = min(feasible, key=lambda g: (g.degree_class, g.work, g.index))
        group.work += length * length
        group.tokens += tokens_per_rank(length, group.degree_class, rules)
        group.shortest = length
        sequence_group[place] = group.index
    return waiting


def _admits(group: OpenGroup, length: int, needed: int, rules: PackingRules) -> bool:
    """Whether an open group is wide enough and keeps target and budget with the sequence."""
    if group.degree_class < needed:
        return False
    tokens = group.tokens + tokens_per_rank(length, group.degree_class, rules)
    work = group.work + length * length
    return tokens <= rules.token_budget and work <= rules.work_limits[group.degree_class]


def grow_scan(packing: Packing, rules: PackingRules) -> IntArray:
    """Give idle ranks to groups: [K] classes after growing. O(K^2).

    While ranks of a microbatch are idle, the smallest group (ties: heaviest, then oldest) takes
    the next legal degree, unless its shortest sequence would be cut under the smallest useful
    shard or too few ranks are idle.
    """
    classes = packing.group_class.copy()
    for microbatch in range(packing.num_microbatches):
        members = np.flatnonzero(packing.group_microbatch == microbatch)
        idle = rules.num_ranks - int(rules.degrees[classes[members]].sum())
        while True:
            growable = [int(g) for g in members if _can_grow(int(g), classes, idle, packing, rules)]
            if not growable:
                break
            chosen = min(growable, key=lambda g: (classes[g], -packing.group_work[g], g))
            idle -= int(rules.degrees[classes[chosen] + 1] - rules.degrees[classes[chosen]])
            classes[chosen] += 1
    return classes


def _can_grow(
    group: int, classes: IntArray, idle: int, packing: Packing, rules: PackingRules
) -> bool:
    wider = classes[group] + 1
    if wider == len(rules.degrees):
        return False
    extra = rules.degrees[wider] - rules.degrees[wider - 1]
    shard = SMALLEST_SHARD_TOKENS * rules.degrees[wider]
    return bool(extra <= idle and packing.group_shortest[group] >= shard)
