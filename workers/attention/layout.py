"""Which token is where: zigzag shards over a group, and shards of its ring after Ulysses.

A group of degree P = u * r cuts each sequence into 2P equal chunks; rank i holds chunks i and
2P - 1 - i, so that causal work is even (Megatron's convention for packed sequences). Ranks
[j u, (j + 1) u) form Ulysses group j, whose members together hold chunks j u .. (j + 1) u - 1 and
their mirror images: exactly chunks j and 2r - 1 - j of a cut into 2r. So one shuffle of rows
after the inner all-to-all leaves a zigzag shard of degree r, and the ring need not know of u.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist

from planner.errors import InputError
from planner.pool import IntArray

Lengths = tuple[int, ...]

# Lengths hardly ever come again in another microbatch: what is worth keeping is a microbatch's
# layout while it passes the layers, and between forward and recompute for the microbatches that a
# pipeline has in flight, which is a few a stage. One more than that costs O(S) once a pass. Each
# holds int64 rows on the device, 16 bytes a token of its Ulysses group, so 8 MiB at 512k tokens:
# a cache of all microbatches of a step would hold GiBs that the memory model does not know of.
CACHED_LAYOUTS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CPGroups:
    """One rank's place in its CP group, and the process groups it works with.

    Args:
        cp: the whole group, `degree` ranks; None where the degree is 1.
        inner: its Ulysses group, `ulysses` consecutive ranks; None where that is 1.
        ring: its ring, every `ulysses`-th rank of the group; None where there is one.
        degree: P, the CP degree.
        ulysses: u, the inner degree.
        rank: this rank's place in the group.
    """

    cp: dist.ProcessGroup | None = None
    inner: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None
    degree: int = 1
    ulysses: int = 1
    rank: int = 0

    @property
    def ring_degree(self) -> int:
        """r, the ranks of the outer ring."""
        return self.degree // self.ulysses

    @property
    def ring_rank(self) -> int:
        """This rank's place in its ring."""
        return self.rank // self.ulysses


@lru_cache(maxsize=CACHED_LAYOUTS)
def zigzag_index(padded_lengths: Lengths, degree: int, rank: int) -> IntArray:
    """The packed padded tokens that `rank` of `degree` holds: chunks rank and 2P - 1 - rank.

    Args:
        padded_lengths: [N] padded tokens of each sequence, multiples of 2 * degree.
        degree: P, the CP degree.
        rank: the place in the group.

    Returns:
        [T] int64, read-only. Cost: O(T), cached.

    Raises:
        InputError: a length cannot be cut into 2P equal chunks.
    """
    if degree == 1:
        return _frozen(np.arange(sum(padded_lengths), dtype=np.int64))
    chunks = shard_lengths(padded_lengths, 2 * degree)
    starts = _starts(padded_lengths)
    front = starts + rank * np.asarray(chunks, dtype=np.int64)
    back = starts + (2 * degree - 1 - rank) * np.asarray(chunks, dtype=np.int64)
    return _frozen(_ranges(np.stack([front, back], axis=1), np.repeat(chunks, 2)))


@lru_cache(maxsize=CACHED_LAYOUTS)
def ulysses_index(local_lengths: Lengths, ulysses: int) -> IntArray:
    """Rows of an all-to-all's result in the order of a zigzag shard of the ring.

    The all-to-all leaves one block of T rows per member, in rank order. Of each sequence the
    fronts of the members follow each other, and their backs too, in the opposite order.

    Args:
        local_lengths: [N] tokens of each sequence on one rank, even.
        ulysses: u, the inner degree.

    Returns:
        [T * u] int64, read-only: row i of the shard is row index[i] of the result.
    """
    halves = np.asarray(shard_lengths(local_lengths, 2), dtype=np.int64)
    members = np.arange(ulysses, dtype=np.int64) * sum(local_lengths)
    fronts = _starts(local_lengths)[:, None] + members[None, :]
    backs = fronts[:, ::-1] + halves[:, None]
    return _frozen(_ranges(np.concatenate([fronts, backs], axis=1), np.repeat(halves, 2 * ulysses)))


def shard_lengths(lengths: Sequence[int], parts: int) -> Lengths:
    """Each length cut into `parts` equal ones.

    Raises:
        InputError: a length is not a multiple of `parts`.
    """
    uneven = [length for length in lengths if length % parts]
    if uneven:
        raise InputError(
            "A padded sequence cannot be cut evenly over its group",
            value=f"{uneven[0]} tokens",
            limit=f"multiples of {parts}",
            remedy="Pad each sequence to a multiple of twice its CP degree.",
        )
    return tuple(length // parts for length in lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Packed sequences on one side of a block of attention.

    Args:
        lengths: [N] tokens of each, none of them empty.
        bounds: [N + 1] int32 on the device of the tensors: where each starts and ends.
        longest: the longest of `lengths`, 0 if there is none.
    """

    lengths: Lengths
    bounds: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Lengths, device: torch.device) -> "Segments":
        """Segments of these lengths, the empty ones left out."""
        filled = tuple(length for length in lengths if length)
        bounds = np.concatenate([[0], np.cumsum(filled, dtype=np.int64)]).astype(np.int32)
        return cls(filled, torch.from_numpy(bounds).to(device), max(filled, default=0))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One call of a kernel: segment n of the queries attends to segment n of the keys.

    `causal` blocks have equal lengths on both sides; the others are not masked.
    """

    queries: Segments
    keys: Segments
    causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class RingStep:
    """What a rank computes with the keys and values it holds for one step of the ring.

    Args:
        block: the kernel's view.
        query_rows: [..] int64, the queries that take part; None for all.
        key_rows: [..] int64, the keys that take part; None for all.
    """

    block: Block
    query_rows: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RingLayout:
    """A rank's three kinds of step, by where the resident keys and values come from.

    A shard is a front and a back half of each sequence. With keys of an earlier rank, all its
    queries are later than the front half of the keys and earlier than the back half; with keys
    of a later rank, only its back queries are later, and than all keys. So each step costs half
    of the first, own one without its mask: the same on every rank.
    """

    own: RingStep
    from_earlier: RingStep
    from_later: RingStep

    def step(self, source: int, rank: int) -> RingStep:
        """The step of `rank` with the keys and values of ring rank `source`."""
        if source == rank:
            return self.own
        return self.from_earlier if source < rank else self.from_later


@lru_cache(maxsize=CACHED_LAYOUTS)
def ring_layout(lengths: Lengths, ring_degree: int, device: torch.device) -> RingLayout:
    """The layout of one shard of a ring.

    Args:
        lengths: [N] tokens of each sequence on one ring rank; even if the ring has more ranks.
        ring_degree: r.
        device: of the index tensors.

    Cost: O(S), cached.
    """
    whole = Segments.of(lengths, device)
    own = RingStep(Block(whole, whole, causal=True))
    if ring_degree == 1:
        return RingLayout(own, own, own)
    half_lengths = shard_lengths(whole.lengths, 2)
    halves = Segments.of(half_lengths, device)
    starts = _starts(whole.lengths)
    sizes = np.asarray(half_lengths, dtype=np.int64)
    front = torch.from_numpy(_ranges(starts, sizes)).to(device)
    back = torch.from_numpy(_ranges(starts + sizes, sizes)).to(device)
    return RingLayout(
        own,
        RingStep(Block(whole, halves, causal=False), key_rows=front),
        RingStep(Block(halves, whole, causal=False), query_rows=back),
    )


@lru_cache(maxsize=CACHED_LAYOUTS)
def ulysses_rows(
    local_lengths: Lengths, ulysses: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ulysses_index` and its inverse as tensors on the device, cached."""
    index = ulysses_index(local_lengths, ulysses)
    inverse = np.empty_like(index)
    inverse[index] = np.arange(len(index))
    return torch.from_numpy(index.copy()).to(device), torch.from_numpy(inverse).to(device)


def _starts(lengths: Sequence[int] | IntArray) -> IntArray:
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - np.asarray(lengths, dtype=np.int64)


def _ranges(starts: IntArray, sizes: IntArray) -> IntArray:
    """The ranges [start, start + size) of all `starts` in row-major order, one after the other."""
    flat = starts.reshape(-1)
    shifts = np.repeat(flat - _starts(sizes), sizes)
    return shifts + np.arange(len(shifts), dtype=np.int64)


def _frozen(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array
