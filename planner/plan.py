"""A plan: every microbatch of one step, as frozen structure-of-arrays with a digest."""

import hashlib
from dataclasses import dataclass, fields

import numpy as np

from planner.pool import IntArray, PoolShape


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All microbatches of one step (the word list is in docs/glossary.md).

    K groups in order of microbatch, then of first rank; N sequences, named by their place in
    the batch. Arrays are int64 and read-only.

    Args:
        planner: the name of the planner that made it.
        pool: the pool it is made for.
        num_microbatches: MBs every rank runs; an MB may leave ranks idle.
        lengths: [N] tokens of each sequence, unpadded, in batch order.
        group_microbatch: [K] the MB of each group.
        group_start: [K] the first HDP rank of each group, a multiple of its size.
        group_size: [K] the group's CP degree P = u * r.
        group_ulysses: [K] u, the inner Ulysses degree; the outer ring has P / u ranks.
        group_offsets: [K + 1] group g holds `members[group_offsets[g]:group_offsets[g + 1]]`.
        members: [N] sequence places, in the order they are packed.
        target_s: the load every rank was steered to, in the planner's own unit.
    """

    planner: str
    pool: PoolShape
    num_microbatches: int
    lengths: IntArray
    group_microbatch: IntArray
    group_start: IntArray
    group_size: IntArray
    group_ulysses: IntArray
    group_offsets: IntArray
    members: IntArray
    target_s: float

    def __post_init__(self) -> None:
        for name in ARRAYS:
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int64).view()
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def num_sequences(self) -> int:
        """N, the sequences of the batch."""
        return len(self.lengths)

    @property
    def num_groups(self) -> int:
        """K, the groups of all microbatches."""
        return len(self.group_size)

    def group_members(self, group: int) -> IntArray:
        """The sequences of one group, in packed order: a view, O(1)."""
        return self.members[self.group_offsets[group] : self.group_offsets[group + 1]]

    def group_of_rank(self, microbatch: int, rank: int) -> int | None:
        """The group that `rank` belongs to in `microbatch`, or None if it is idle. O(log K)."""
        first = int(np.searchsorted(self.group_microbatch, microbatch, side="left"))
        last = int(np.searchsorted(self.group_microbatch, microbatch, side="right"))
        starts = self.group_start[first:last]
        at = first + int(np.searchsorted(starts, rank, side="right")) - 1
        if at < first or rank >= self.group_start[at] + self.group_size[at]:
            return None
        return at

    def digest(self) -> str:
        """A 128-bit BLAKE2b of every field, in hexadecimal: equal plans, equal digests. O(N)."""
        state = hashlib.blake2b(digest_size=16)
        state.update(
            f"{self.planner}|{self.pool}|{self.num_microbatches}|{self.target_s!r}".encode()
        )
        for name in ARRAYS:
            array: IntArray = getattr(self, name)
            state.update(f"|{name}:{len(array)}|".encode())
            state.update(array.tobytes())
        return state.hexdigest()


ARRAYS = tuple(field.name for field in fields(Plan) if field.type is IntArray)


def group_tokens(plan: Plan) -> IntArray:
    """[K] padded tokens on each rank of each group. O(N)."""
    unit = plan.pool.pad_unit
    group_of_member = np.repeat(np.arange(plan.num_groups), np.diff(plan.group_offsets))
    shares = plan.group_size[group_of_member] * unit
    tokens = np.zeros(plan.num_groups, dtype=np.int64)
    np.add.at(tokens, group_of_member, -(-plan.lengths[plan.members] // shares) * unit)
    return tokens


def empty_plan(planner: str, pool: PoolShape) -> Plan:
    """The plan of a batch without sequences: no microbatches."""
    none = np.zeros(0, dtype=np.int64)
    return Plan(
        planner=planner,
        pool=pool,
        num_microbatches=0,
        lengths=none,
        group_microbatch=none,
        group_start=none,
        group_size=none,
        group_ulysses=none,
        group_offsets=np.zeros(1, dtype=np.int64),
        members=none,
        target_s=0.0,
    )
