"""Outer ring: keys and values travel round, each rank attends to what it holds meanwhile.

Each rank holds a zigzag shard of its queries (see `layout`). In r steps the keys and values of
all ranks pass by, one hop a step; the hop to the next step is under way while this one computes
(a double buffer). Partial results merge exactly:

    Let a query's keys fall into disjoint sets A and B, with scores x, L = log sum exp x and
    out = sum exp(x - L) v over each. Over both, exp(L) = exp(L_A) + exp(L_B), and
        out = exp(L_A - L) out_A + exp(L_B - L) out_B = out_A + w (out_B - out_A),
    with w = exp(L_B - L) = sigmoid(L_B - L_A). No exponent is ever positive, so none overflows.

Backward needs only the merged out and L: the probability of a key is exp(x - L) whichever set it
is in, and the softmax's correction sum_j p_j dp_j is d_out . out. So each block's kernel is given
the merged ones, and gradients of blocks add up. Gradients of keys and values travel with them
and are home after r - 1 hops, because a rank's own part never leaves it.

Sums are kept in float32 (float64 for float64), and so do the gradients travel.

Shape legend: S tokens of the shard, H query heads, K key-value heads, D and E head dims.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from workers.attention.counters import Counters
from workers.attention.kernels import Kernel
from workers.attention.layout import RingLayout

Tensor = torch.Tensor

# Hops of keys and values, and of their gradients, overlap between the same two ranks.
KV_TAG, GRADIENT_TAG = 0, 1


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """One rank's place in a ring, and what it works with.

    Args:
        layout: of its shard.
        group: the ring's; None where it has one rank.
        degree: r.
        rank: the place in the ring.
        scale: of the scores, before the softmax.
        kernel: computes the blocks.
        counters: bytes, waits and kernel times go here.
    """

    layout: RingLayout
    group: dist.ProcessGroup | None
    degree: int
    rank: int
    scale: float
    kernel: Kernel
    counters: Counters


def ring_attention(q_SHD: Tensor, k_SKD: Tensor, v_SKE: Tensor, ring: Ring) -> Tensor:
    """Causal attention of this rank's queries over all keys of its ring: [S, H, E].

    Cost: half of the ring's s^2 / r on every rank; sends (r - 1) S K (D + E) elements forward,
    that again and its gradients backward (float32 at least).
    """
    out_SHE: Tensor = _RingAttention.apply(q_SHD, k_SKD, v_SKE, ring)
    return out_SHE


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_SHD: Tensor, k_SKD: Tensor, v_SKE: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        out_SHE, lse_HS = _forward(q_SHD, k_SKD, v_SKE, ring)
        ctx.save_for_backward(q_SHD, k_SKD, v_SKE, out_SHE, lse_HS)
        return out_SHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_SHE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_SHD, k_SKD, v_SKE, out_SHE, lse_HS = ctx.saved_tensors
        merged = _Partial(out_SHE, lse_HS)
        return *_backward(d_out_SHE, q_SHD, k_SKD, v_SKE, merged, ctx.ring), None


def _forward(q_SHD: Tensor, k_SKD: Tensor, v_SKE: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    precision = torch.promote_types(q_SHD.dtype, torch.float32)
    merged: _Partial | None = None
    for source, k_now, v_now in _circulate(k_SKD, v_SKE, ring, "forward"):
        step = ring.layout.step(source, ring.rank)
        with ring.counters.span("kernel", "forward kernel", q_SHD.device):
            out, lse = ring.kernel.forward(
                _rows(q_SHD, step.query_rows),
                _rows(k_now, step.key_rows),
                _rows(v_now, step.key_rows),
                step.block,
                ring.scale,
            )
        if ring.degree == 1:
            return out, lse
        part = _Partial(out.to(precision), lse)
        merged = part if merged is None else _merge(merged, part, step.query_rows)
    if merged is None:
        raise RuntimeError("a ring has at least one step")
    return merged.out_SHE.to(q_SHD.dtype), merged.lse_HS


class _Partial(NamedTuple):
    """Attention over the keys seen so far."""

    out_SHE: Tensor
    lse_HS: Tensor


def _merge(merged: _Partial, part: _Partial, rows: Tensor | None) -> _Partial:
    """`merged` with `part` over other keys, for all its rows or for some; updated in place."""
    lse_HS = merged.lse_HS if rows is None else merged.lse_HS.index_select(1, rows)
    weight_S1H = torch.sigmoid(part.lse_HS - lse_HS).t().unsqueeze(-1)
    lse_HS = torch.logaddexp(lse_HS, part.lse_HS)
    if rows is None:
        return _Partial(merged.out_SHE.lerp_(part.out_SHE, weight_S1H), lse_HS)
    out_SHE = merged.out_SHE.index_select(0, rows).lerp_(part.out_SHE, weight_S1H)
    return _Partial(
        merged.out_SHE.index_copy_(0, rows, out_SHE), merged.lse_HS.index_copy_(1, rows, lse_HS)
    )


def _backward(
    d_out_SHE: Tensor,
    q_SHD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    merged: "_Partial",
    ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:
    precision = torch.promote_types(q_SHD.dtype, torch.float32)
    gradients = _KeyGradients(k_SKD, v_SKE, ring, precision)
    dq_SHD = q_SHD
    for source, k_now, v_now in _circulate(k_SKD, v_SKE, ring, "backward"):
        step = ring.layout.step(source, ring.rank)
        rows = step.query_rows
        with ring.counters.span("kernel", "backward kernel", q_SHD.device):
            dq, dk, dv = ring.kernel.backward(
                _rows(d_out_SHE, rows),
                _rows(q_SHD, rows),
                _rows(k_now, step.key_rows),
                _rows(v_now, step.key_rows),
                _rows(merged.out_SHE, rows),
                merged.lse_HS if rows is None else merged.lse_HS.index_select(1, rows),
                step.block,
                ring.scale,
            )
        if ring.degree == 1:
            return dq, dk, dv
        if source == ring.rank:
            dq_SHD = dq.to(precision)
        else:
            _add_rows(dq_SHD, dq, rows)
        gradients.add(source, dk, dv, step.key_rows)
    dk_SKD, dv_SKE = gradients.home()
    return dq_SHD.to(q_SHD.dtype), dk_SKD.to(k_SKD.dtype), dv_SKE.to(v_SKE.dtype)


class _KeyGradients:
    """Gradients of keys and values on their way home.

    A rank adds its part to what came with the keys, and hands it on with them. What it adds for
    its own keys, in the first step, stays and meets the rest when that has been round.
    """

    def __init__(self, k_SKD: Tensor, v_SKE: Tensor, ring: Ring, precision: torch.dtype) -> None:
        self._shapes, self._ring = (k_SKD.shape, v_SKE.shape), ring
        self._zeros = k_SKD.new_zeros(k_SKD.numel() + v_SKE.numel(), dtype=precision)
        self._own = self._zeros
        self._hop: _Hop | None = None

    def add(self, source: int, dk: Tensor, dv: Tensor, rows: Tensor | None) -> None:
        """Add this rank's part for the keys of ring rank `source`."""
        arrived = self._zeros.clone() if self._hop is None else self._hop.wait()
        for total, part in zip(_unpack(arrived, *self._shapes), (dk, dv), strict=True):
            _add_rows(total, part, rows)
        if source == self._ring.rank:
            self._own = arrived
        else:
            self._hop = _Hop(arrived, self._ring, GRADIENT_TAG, "backward", "gradient")

    def home(self) -> tuple[Tensor, Tensor]:
        """The whole gradients of this rank's own keys and values."""
        if self._hop is not None:
            self._own.add_(self._hop.wait())
        return _unpack(self._own, *self._shapes)


def _circulate(
    k_SKD: Tensor, v_SKE: Tensor, ring: Ring, phase: str
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(source, k, v) of every rank of the ring, own ones first; the next hop is under way."""
    if ring.degree == 1:
        yield ring.rank, k_SKD, v_SKE
        return
    buffer = torch.cat([k_SKD.reshape(-1), v_SKE.reshape(-1)])
    for step in range(ring.degree):
        is_last = step == ring.degree - 1
        hop = None if is_last else _Hop(buffer, ring, KV_TAG, phase, "key-value")
        yield (ring.rank - step) % ring.degree, *_unpack(buffer, k_SKD.shape, v_SKE.shape)
        if hop is not None:
            buffer = hop.wait()


class _Hop:
    """One buffer on its way to the next rank, the previous rank's on its way here."""

    def __init__(self, buffer: Tensor, ring: Ring, tag: int, phase: str, name: str) -> None:
        self._sent, self._received = buffer, torch.empty_like(buffer)
        self._counters, self._name = ring.counters, f"{phase} wait {name}"
        following, previous = (ring.rank + 1) % ring.degree, (ring.rank - 1) % ring.degree
        self._counters.mark(f"{phase} launch {name}")
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, group=ring.group, tag=tag, group_peer=following),
                dist.P2POp(
                    dist.irecv, self._received, group=ring.group, tag=tag, group_peer=previous
                ),
            ]
        )
        self._counters.sent("ring", buffer.numel() * buffer.element_size())

    def wait(self) -> Tensor:
        """What arrived from the previous rank."""
        with self._counters.span("wait", self._name, self._received.device):
            for work in self._works:
                work.wait()
        return self._received


def _unpack(buffer: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
    k_SKD, v_SKE = buffer.split([k_shape.numel(), v_shape.numel()])
    return k_SKD.view(k_shape), v_SKE.view(v_shape)


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _add_rows(total: Tensor, part: Tensor, rows: Tensor | None) -> None:
    if rows is None:
        total.add_(part)
    else:
        total.index_add_(0, rows, part.to(total.dtype))
