"""Context-parallel attention of one microbatch: the way in.

`context_parallel_attention` is the whole in one call. A layer that wants its all-to-alls hidden
makes an `Attention`, launches each of query, value and key as soon as it is final, computes what
else it has to, and then calls `attend` (HyDra paper, section 5.2.2).

Shape legend: T local tokens, H query heads, K key-value heads, D head dim of queries and keys,
E head dim of values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from planner.errors import InputError
from workers.attention.all_to_all import HeadExchange, InFlight, launch, wait
from workers.attention.counters import Counters
from workers.attention.kernels import choose_kernel
from workers.attention.layout import CPGroups, Lengths, ring_layout, shard_lengths, ulysses_rows
from workers.attention.ring import Ring, ring_attention

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """One attention layer's work on one microbatch, on one rank.

    Args:
        lengths: [N] padded tokens of each packed sequence over the whole group, multiples of
            twice its degree.
        groups: this rank's CP group.
        scale: of the scores, before the softmax.
        counters: what is measured.
        overlap: False waits for each all-to-all where it is launched; the bits are the same.
        kernel: a kernel's name, or None for the rule of `kernels.choose`.
    """

    lengths: Lengths
    groups: CPGroups
    scale: float
    counters: Counters
    overlap: bool = True
    kernel: str | None = None

    def launch_query(self, q_THD: Tensor) -> InFlight:
        """Send the query on its way; it is final once rotated.

        Raises:
            InputError: its tokens are not a shard of `lengths`, or u does not divide its heads.
        """
        self._check_query(q_THD)
        return self._launch(q_THD, "query")

    def launch_key(self, k_TKD: Tensor) -> InFlight:
        """Send the key on its way; it is final once rotated."""
        return self._launch(self._replicated(k_TKD), "key")

    def launch_value(self, v_TKE: Tensor) -> InFlight:
        """Send the value on its way; it is final once projected."""
        return self._launch(self._replicated(v_TKE), "value")

    def attend(self, query: InFlight, key: InFlight, value: InFlight) -> Tensor:
        """Wait for all three, in the order of launch, and attend: [T, H, E]."""
        q_SHD, v_SKE, k_SKD = wait(query), wait(value), wait(key)
        out_SHE = ring_attention(q_SHD, k_SKD, v_SKE, self._ring(q_SHD))
        exchange = self._exchange(out_SHE.device)
        return wait(launch(out_SHE, exchange, "output", "outward"))

    def _launch(self, x_THD: Tensor, name: str) -> InFlight:
        flight = launch(x_THD, self._exchange(x_THD.device), name, "inward")
        return flight if self.overlap else InFlight(wait(flight))

    def _exchange(self, device: torch.device) -> HeadExchange | None:
        if self.groups.inner is None:
            return None
        local = shard_lengths(self.lengths, self.groups.degree)
        rows, inverse_rows = ulysses_rows(local, self.groups.ulysses, device)
        return HeadExchange(
            self.groups.inner, self.groups.ulysses, rows, inverse_rows, self.counters
        )

    def _ring(self, q_SHD: Tensor) -> Ring:
        ring_degree = self.groups.ring_degree
        return Ring(
            ring_layout(shard_lengths(self.lengths, ring_degree), ring_degree, q_SHD.device),
            self.groups.ring,
            ring_degree,
            self.groups.ring_rank,
            self.scale,
            choose_kernel(q_SHD.device.type, q_SHD.dtype, self.kernel),
            self.counters,
        )

    def _replicated(self, x_TKD: Tensor) -> Tensor:
        """Repeat key-value heads so that u divides them; their gradients sum by autograd.

        Each of the lcm(u, K) copies still serves a run of query heads, for u and K divide H.
        """
        heads = x_TKD.size(1)
        copies = math.lcm(heads, self.groups.ulysses) // heads
        return x_TKD if copies == 1 else x_TKD.repeat_interleave(copies, dim=1)

    def _check_query(self, q_THD: Tensor) -> None:
        degree, ulysses = self.groups.degree, self.groups.ulysses
        if q_THD.size(1) % ulysses:
            raise InputError(
                "The inner Ulysses degree must divide the query heads of a rank",
                value=ulysses,
                limit=f"a divisor of {q_THD.size(1)}",
                remedy="Choose another cp_comm, or let it be auto.",
            )
        if degree > 1:
            shard_lengths(self.lengths, 2 * degree)
        if q_THD.size(0) * degree != sum(self.lengths):
            raise InputError(
                "The tokens are not this rank's share of the packed sequences",
                value=q_THD.size(0),
                limit=f"{sum(self.lengths)} / {degree}",
            )


def context_parallel_attention(  # noqa: PLR0913 - three tensors and what is known of them
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKE: Tensor,
    *,
    lengths: Sequence[int],
    groups: CPGroups,
    scale: float,
    counters: Counters,
    overlap: bool = True,
    kernel: str | None = None,
) -> Tensor:
    """Causal attention of packed sequences sharded zigzag over a CP group.

    Args:
        q_THD: [T, H, D] this rank's queries, each sequence's front and back chunk in turn.
        k_TKD: [T, K, D] keys; K divides H.
        v_TKE: [T, K, E] values; E may differ from D (MLA).
        lengths: [N] padded GLOBAL tokens of each sequence, multiples of twice the degree.
        groups: this rank's CP group.
        scale: of the scores, before the softmax.
        counters: what is measured.
        overlap: False waits for each all-to-all where it is launched; the bits are the same.
        kernel: a kernel's name, or None for the rule of `kernels.choose`.

    Returns:
        [T, H, E], differentiable once.

    Raises:
        InputError: the tokens are not a shard of `lengths`, or u does not divide the heads.
    """
    attention = Attention(
        lengths=tuple(lengths),
        groups=groups,
        scale=scale,
        counters=counters,
        overlap=overlap,
        kernel=kernel,
    )
    query = attention.launch_query(q_THD)
    value = attention.launch_value(v_TKE)
    key = attention.launch_key(k_TKD)
    return attention.attend(query, key, value)
