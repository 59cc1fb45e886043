"""What a sequence costs each rank of its group, in seconds, at every CP degree.

The coefficients are for the layers of ONE pipeline stage, forward plus backward: the time a
microbatch holds a stage. At degree k, s padded to pad(s, k):

    c(s, k) = q s^2 / k + l pad / k + exposed all-to-all + max(0, ring - q s^2 / k) + latency

The zigzag halves share causal attention evenly, hence 1/k; a ring's transfers hide behind its
own attention blocks, so only what exceeds them is paid (HyDra paper, section 5.2).
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.factorize import (
    ALLTOALL_PASSES,
    RING_PASSES,
    AttentionShape,
    CpComm,
    factorize,
    off_node_share,
    traffic_bytes,
)
from planner.pool import IntArray, PoolShape

FloatArray = npt.NDArray[np.float64]

LLAMA3_8B_ATTENTION = AttentionShape(num_heads=32, num_kv_heads=8, qk_dim=128, v_dim=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """The costs of one pool, one entry a degree: D degrees, arrays of [D], read-only.

    Args:
        degrees: int64, the legal CP degrees, ascending.
        ulysses: int64, u of each degree; its ring has degrees / ulysses ranks.
        quadratic_s: seconds per squared token on each rank; 1 / degree is already in it.
        linear_s: seconds per padded token of the whole sequence on each rank.
        alltoall_s: exposed all-to-all seconds per padded token.
        ring_s: ring seconds per padded token, hidden up to the attention time.
        latency_s: seconds each sequence adds, however short.
        fixed_s: t0, seconds each microbatch adds.
        pad_unit: a sequence is padded to a multiple of pad_unit * degree.
    """

    degrees: IntArray
    ulysses: IntArray
    quadratic_s: FloatArray
    linear_s: FloatArray
    alltoall_s: FloatArray
    ring_s: FloatArray
    latency_s: FloatArray
    fixed_s: float
    pad_unit: int

    def __post_init__(self) -> None:
        for array in (self.degrees, self.ulysses, self.quadratic_s, self.linear_s):
            array.setflags(write=False)
        for array in (self.alltoall_s, self.ring_s, self.latency_s):
            array.setflags(write=False)

    def sequence_s(self, lengths: IntArray, degree_index: int | IntArray) -> FloatArray:
        """Seconds on each rank of sequences at `degrees[degree_index]`; the two broadcast."""
        unit = self.degrees[degree_index] * self.pad_unit
        padded = (-(-lengths // unit) * unit).astype(np.float64)
        attention = self.quadratic_s[degree_index] * np.square(lengths, dtype=np.float64)
        per_token = self.linear_s[degree_index] + self.alltoall_s[degree_index]
        exposed_ring = np.maximum(0.0, self.ring_s[degree_index] * padded - attention)
        seconds: FloatArray = (
            attention + per_token * padded + exposed_ring + self.latency_s[degree_index]
        )
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The coefficients of one model on one machine. The defaults are Llama-3-8B on H100 nodes.

    Defaults: 8 of its 32 layers a stage (4096 hidden, 32 query and 8 key-value heads of 128,
    feed-forward 14336), tensor parallel 1, bf16.

    Args:
        quadratic_s: seconds per squared token, degree 1. Causal attention is
            s^2 H (d_qk + d_v) = 8192 s^2 FLOP a layer forward, 2.5 times that backward;
            FlashAttention-3 on H100 runs 616 TFLOP/s forward and 561 backward at 16K tokens, head
            128, causal (figures of the FlashAttention-3 paper): 8 x 8192 (1/616 + 2.5/561) ps.
        linear_s: seconds per token, degree 1: 218M weights a layer, 6 FLOP each, at 700 TFLOP/s
            (bf16 matmuls of 4096 x 8192 on H100 measured by DistCA, 580 to 780).
        fixed_s: t0, seconds a microbatch adds however small: about 180 kernels a layer, forward
            and backward, launched at 4 us each (an estimate: `fit` replaces it).
        attention: the heads, over all tensor-parallel ranks.
        num_layers: layers with attention in one stage: what the traffic is multiplied by.
        tensor: tensor-parallel ranks behind each HDP rank.
        ranks_per_node: accelerators a node has.
        intra_node_bytes_per_s: NVLink 4 as NCCL delivers it: 331 GB/s for 128 MB on 8 H100
            (DistCA's network profile).
        inter_node_bytes_per_s: one 400 Gb/s NIC an accelerator as an all-to-all sees it: 43 GB/s
            (DeepEP's table, 16 ranks).
        exposed_alltoall: the share of all-to-all time nothing hides: with query, key and value
            launched early only the output's is waited for, about a quarter of the bytes.
        latency_s: seconds each sequence adds at degrees above 1; 0 as packed sequences share
            their collectives and kernels.
        cp_comm: which (u, r) splits are used: "auto", "ulysses", "ring", or (u, r).

    Raises:
        InputError: a coefficient is negative, not a number, or infinite.
    """

    quadratic_s: float = 4.0e-10
    linear_s: float = 1.5e-5
    fixed_s: float = 5.8e-3
    attention: AttentionShape = field(default=LLAMA3_8B_ATTENTION)
    num_layers: int = 8
    tensor: int = 1
    ranks_per_node: int = 8
    intra_node_bytes_per_s: float = 331e9
    inter_node_bytes_per_s: float = 43e9
    exposed_alltoall: float = 0.25
    latency_s: float = 0.0
    cp_comm: CpComm = "auto"

    def __post_init__(self) -> None:
        for name in ("quadratic_s", "linear_s", "fixed_s", "exposed_alltoall", "latency_s"):
            _require_finite(name, getattr(self, name), above_zero=False)
        for name in ("intra_node_bytes_per_s", "inter_node_bytes_per_s"):
            _require_finite(name, getattr(self, name), above_zero=True)
        if self.quadratic_s == 0 and self.linear_s == 0:
            raise InputError(
                "A sequence must cost something", remedy="Set quadratic_s or linear_s above zero."
            )

    def table(self, pool: PoolShape) -> CostTable:
        """The costs at every legal degree of a pool. O(degrees x heads).

        Raises:
            InputError: `cp_comm` allows no split of one of the pool's degrees.
        """
        return _table(self, pool)


@lru_cache(maxsize=64)
def _table(cost: CostModel, pool: PoolShape) -> CostTable:
    """Kept, as the pool and the model stay the same for many steps. Its arrays are read-only."""
    splits = [
        factorize(
            degree,
            cost.attention,
            cp_comm=cost.cp_comm,
            tensor=cost.tensor,
            ranks_per_node=cost.ranks_per_node,
        )
        for degree in pool.degrees
    ]
    traffic_s = [_traffic_s(cost, u, r) for u, r in splits]
    degrees = np.array(pool.degrees, dtype=np.int64)
    return CostTable(
        degrees=degrees,
        ulysses=np.array([u for u, _ in splits], dtype=np.int64),
        quadratic_s=cost.quadratic_s / degrees,
        linear_s=cost.linear_s / degrees,
        alltoall_s=cost.exposed_alltoall * np.array([a for a, _ in traffic_s]),
        ring_s=np.array([r for _, r in traffic_s]),
        latency_s=np.where(degrees > 1, cost.latency_s, 0.0),
        fixed_s=cost.fixed_s,
        pad_unit=pool.pad_unit,
    )


def _traffic_s(cost: CostModel, ulysses: int, ring: int) -> tuple[float, float]:
    """All-to-all and ring seconds per padded token, forward plus backward, one stage."""
    sent = traffic_bytes(cost.attention.split(cost.tensor), ulysses, ring)
    hdp_per_node = max(1, cost.ranks_per_node // cost.tensor)
    leaving = off_node_share(ulysses, hdp_per_node)
    byte_s = (1 - leaving) / cost.intra_node_bytes_per_s + leaving / cost.inter_node_bytes_per_s
    within_node = ulysses * ring <= hdp_per_node
    hop_bytes_per_s = cost.intra_node_bytes_per_s if within_node else cost.inter_node_bytes_per_s
    return (
        cost.num_layers * ALLTOALL_PASSES * sent.alltoall_bytes * byte_s,
        cost.num_layers * RING_PASSES * sent.ring_bytes / hop_bytes_per_s,
    )


def _require_finite(name: str, value: float, *, above_zero: bool) -> None:
    if math.isfinite(value) and (value > 0 if above_zero else value >= 0):
        return
    limit = "a finite number above zero" if above_zero else "a finite number of at least zero"
    raise InputError(f"{name} of the cost model cannot be used", value=value, limit=limit)
