"""torch's fused flash attention for CPUs.

The operator takes [B, H, S, D] and has no packed form, so sequences go in one by one. Runs of
equal lengths go in as one batch: a view, no copy. Two things matter for short sequences, whose
attention takes some 50 us: tensors are cut into views for all sequences at once, and each result
is copied out at once, so that the next one finds its memory in the cache.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

import torch

from workers.attention.kernels.interface import Tensor, pad_heads
from workers.attention.layout import Block, Lengths

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash:
    """`_scaled_dot_product_flash_attention_for_cpu` over packed sequences."""

    name = "torch-cpu-flash"

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        width = v_SKE.size(-1)
        q, k, v = pad_heads((q_THD, k_SKD, v_SKE))
        queries, keys = _runs(block)
        out = _Packed.like(q, queries)
        lse = _Packed(_empty_lse(q), queries)
        operands = (_cut(q, queries), _cut(k, keys), _cut(v, keys))
        for index, (q_run, k_run, v_run) in enumerate(zip(*operands, strict=True)):
            out_run, lse_run = flash(q_run, k_run, v_run, 0.0, block.causal, scale=scale)
            out.put(index, out_run)
            lse.put(index, lse_run.unsqueeze(-1))
        return out.whole()[..., :width], lse.whole()[..., 0].t()

    def backward(
        self,
        d_out_THE: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKE: Tensor,
        out_THE: Tensor,
        lse_HT: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        dim, width = q_THD.size(-1), v_SKE.size(-1)
        d_out, q, k, v, out = pad_heads((d_out_THE, q_THD, k_SKD, v_SKE, out_THE))
        queries, keys = _runs(block)
        dq, dk, dv = _Packed.like(q, queries), _Packed.like(k, keys), _Packed.like(v, keys)
        operands = (
            *(_cut(d_out, queries), _cut(q, queries), _cut(k, keys), _cut(v, keys)),
            *(_cut(out, queries), _cut(lse_HT.t().unsqueeze(-1), queries)),
        )
        for index, (*tensors, lse) in enumerate(zip(*operands, strict=True)):
            gradients = flash_backward(*tensors, lse[..., 0], 0.0, block.causal, scale=scale)
            for packed, gradient in zip((dq, dk, dv), gradients, strict=True):
                packed.put(index, gradient)
        return dq.whole()[..., :dim], dk.whole()[..., :dim], dv.whole()[..., :width]


Runs = tuple[tuple[int, int], ...]  # sequences in the run, tokens of each


@lru_cache(maxsize=4096)
def equal_runs(query_lengths: Lengths, key_lengths: Lengths) -> tuple[Runs, Runs]:
    """Runs of neighbours with equal lengths on both sides: (of queries, of keys)."""
    pairs = zip(query_lengths, key_lengths, strict=True)
    runs = list(_counted(pairs))
    return tuple((n, pair[0]) for n, pair in runs), tuple((n, pair[1]) for n, pair in runs)


def _counted(pairs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, tuple[int, int]]]:
    for pair, run in groupby(pairs):
        yield len(list(run)), pair


def _runs(block: Block) -> tuple[Runs, Runs]:
    return equal_runs(block.queries.lengths, block.keys.lengths)


def _cut(x_THD: Tensor, runs: Runs) -> list[Tensor]:
    """Views of [T, H, D] as [B, H, S, D], one a run."""
    pieces = x_THD.transpose(0, 1).unsqueeze(0).split([n * length for n, length in runs], dim=2)
    return [
        piece if n == 1 else piece[0].unflatten(1, (n, length)).transpose(0, 1)
        for piece, (n, length) in zip(pieces, runs, strict=True)
    ]


class _Packed:
    """A packed [T, H, D] that fills run by run; a single run is taken as it is."""

    def __init__(self, whole_THD: Tensor, runs: Runs) -> None:
        self._whole_THD = whole_THD
        self._runs = _cut(whole_THD, runs)

    @classmethod
    def like(cls, x_THD: Tensor, runs: Runs) -> "_Packed":
        return cls(torch.empty(x_THD.shape, dtype=x_THD.dtype), runs)

    def put(self, index: int, result_BHSD: Tensor) -> None:
        if len(self._runs) == 1:  # the operator lays its results out [B, S, H, D]: a view
            self._whole_THD = result_BHSD.transpose(1, 2).flatten(0, 1)
        else:
            self._runs[index].copy_(result_BHSD)

    def whole(self) -> Tensor:
        return self._whole_THD


def _empty_lse(q_THD: Tensor) -> Tensor:
    """[T, H, 1], laid out as the operator lays out its own."""
    precision = torch.promote_types(q_THD.dtype, torch.float32)
    return torch.empty((q_THD.size(0), q_THD.size(1), 1), dtype=precision)
