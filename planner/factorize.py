"""Cut a CP degree P into an inner Ulysses group of u ranks and an outer ring of r: P = u * r.

Bytes are what one rank sends for one token of a sequence, in one layer, forward. With H query
heads, K = max(H_kv, u) key-value heads (replicated once u exceeds them) and b bytes an element:

    all-to-all  b (u-1)/u / P [H d_qk + K (d_qk + d_v) + H d_v]     Q, K, V in; O out
    ring        b (r-1)/r (K / u) (d_qk + d_v)                      r - 1 hops of K and V

Backward repeats the all-to-alls once (dO, dQ, dK, dV) and the ring twice (K and V again, and
their gradients). In bfloat16 the engine sends those gradients in float32, which doubles their
bytes (docs/numerics.md); here they are priced as the paper's formula has them.
"""

import math
from dataclasses import dataclass
from typing import Literal

from planner.errors import InputError

CpComm = Literal["auto", "ulysses", "ring"] | tuple[int, int]

ALLTOALL_PASSES = 2
RING_PASSES = 3
# One NIC of 400 Gb/s against one NVLink 4 port set of 450 GB/s: a byte that leaves the node
# takes about nine times as long.
NODE_EXIT_COST = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The heads of one attention layer, over all tensor-parallel ranks.

    Args:
        num_heads: H, query heads.
        num_kv_heads: H_kv, key and value heads; H for multi-head latent attention.
        qk_dim: elements of a query or key head.
        v_dim: elements of a value head.
        bytes_per_element: of the activations that travel.
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        for field in ("num_heads", "num_kv_heads", "qk_dim", "v_dim", "bytes_per_element"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{field} must be a whole number above zero", value=value, limit=">= 1"
                )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                "Query heads must be a multiple of key-value heads",
                value=f"{self.num_heads} and {self.num_kv_heads}",
                remedy="Use equal numbers, or a divisor of num_heads for num_kv_heads.",
            )

    def split(self, tensor: int) -> "AttentionShape":
        """The heads one tensor-parallel rank holds (key-value heads are replicated below one)."""
        if tensor < 1 or self.num_heads % tensor:
            raise InputError(
                "Tensor parallelism must divide the query heads",
                value=tensor,
                limit=f"a divisor of {self.num_heads}",
            )
        return AttentionShape(
            num_heads=self.num_heads // tensor,
            num_kv_heads=max(1, self.num_kv_heads // tensor),
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            bytes_per_element=self.bytes_per_element,
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes one rank sends for one token of a sequence, in one layer, forward."""

    alltoall_bytes: float
    ring_bytes: float


def traffic_bytes(attention: AttentionShape, ulysses: int, ring: int) -> Traffic:
    """Bytes a token of an (ulysses x ring) group costs each rank: forward, one layer.

    Args:
        attention: the heads that one rank holds (after tensor parallelism).
        ulysses: u, the inner degree.
        ring: r, the outer degree.
    """
    kv_heads = max(attention.num_kv_heads, ulysses)
    kv_elements = kv_heads * (attention.qk_dim + attention.v_dim)
    query_elements = attention.num_heads * (attention.qk_dim + attention.v_dim)
    scale = attention.bytes_per_element
    alltoall = (ulysses - 1) / ulysses / (ulysses * ring) * (query_elements + kv_elements)
    travelling = (ring - 1) / ring * kv_elements / ulysses
    return Traffic(scale * alltoall, scale * travelling)


def off_node_share(ulysses: int, ranks_per_node: int) -> float:
    """The share of an all-to-all's bytes that leave the node, u consecutive ranks a group."""
    if ulysses <= ranks_per_node:
        return 0.0
    return (ulysses - ranks_per_node) / (ulysses - 1)


def is_legal_ulysses(ulysses: int, degree: int, attention: AttentionShape) -> bool:
    """Whether u cuts the degree, the query heads, and the key-value heads (or replicates them)."""
    cuts_kv = attention.num_kv_heads % ulysses == 0 or ulysses % attention.num_kv_heads == 0
    return degree % ulysses == 0 and attention.num_heads % ulysses == 0 and cuts_kv


def factorize(
    degree: int,
    attention: AttentionShape,
    *,
    cp_comm: CpComm = "auto",
    tensor: int = 1,
    ranks_per_node: int = 8,
) -> tuple[int, int]:
    """Split a degree into (u, r). Cost: O(heads).

    "auto" takes the split whose bytes, forward and backward, travel fastest (a byte that leaves
    the node counts `NODE_EXIT_COST` times); equal ones go to the shallower ring. "ulysses" has
    no ring, "ring" no Ulysses; (u, r) bounds both factors.

    Args:
        degree: P, the CP degree.
        attention: the heads of the layer, over all tensor-parallel ranks.
        cp_comm: which splits are allowed.
        tensor: tensor-parallel ranks behind each HDP rank.
        ranks_per_node: accelerators a node has.

    Raises:
        InputError: no allowed split makes this degree.
    """
    local = attention.split(tensor)
    most_ulysses, most_ring = _bounds(degree, cp_comm)
    splits = [
        (u, degree // u)
        for u in range(1, min(local.num_heads, most_ulysses) + 1)
        if is_legal_ulysses(u, degree, local) and degree // u <= most_ring
    ]
    if not splits:
        raise InputError(
            f"No {_named(cp_comm)} split makes this CP degree of {local.num_heads} heads a rank",
            value=degree,
            remedy="Lower max_degree, or use cp_comm auto.",
        )
    if cp_comm != "auto":
        return splits[-1]
    hdp_per_node = max(1, ranks_per_node // tensor)
    return min(splits, key=lambda split: (_weighted_bytes(local, split, hdp_per_node), split[1]))


def largest_degree(
    degrees: tuple[int, ...], attention: AttentionShape, *, cp_comm: CpComm, tensor: int = 1
) -> int:
    """The largest degree such that it and every smaller one can be split: a pool's max_degree."""
    largest = 1
    for degree in degrees:
        try:
            factorize(degree, attention, cp_comm=cp_comm, tensor=tensor)
        except InputError:
            break
        largest = degree
    return largest


def _bounds(degree: int, cp_comm: CpComm) -> tuple[int, int]:
    if cp_comm == "auto":
        return degree, degree
    if cp_comm == "ulysses":
        return degree, 1
    if cp_comm == "ring":
        return 1, degree
    if isinstance(cp_comm, tuple) and len(cp_comm) == 2 and min(cp_comm) >= 1:
        return cp_comm
    raise InputError(
        "Unknown cp_comm", value=cp_comm, limit="auto, ulysses, ring, or (u, r) of at least 1"
    )


def _named(cp_comm: CpComm) -> str:
    return cp_comm if isinstance(cp_comm, str) else f"{cp_comm[0]} x {cp_comm[1]}"


def _weighted_bytes(attention: AttentionShape, split: tuple[int, int], hdp_per_node: int) -> float:
    ulysses, ring = split
    sent = traffic_bytes(attention, ulysses, ring)
    leaving = off_node_share(ulysses, hdp_per_node)
    alltoall = ALLTOALL_PASSES * sent.alltoall_bytes * (1 + (NODE_EXIT_COST - 1) * leaving)
    # A ring is as fast as its slowest hop, so one hop between nodes prices them all.
    hop = NODE_EXIT_COST if math.prod(split) > hdp_per_node else 1.0
    return alltoall + RING_PASSES * sent.ring_bytes * hop
