"""torch's fused flash attention for CPUs.

The operator takes [B, H, S, D] and has no packed form, so sequences go in one by one. Runs of
equal lengths go in as one batch: a view, no copy. (A call costs some 30 us beside its work, as
much as the work itself at 16 tokens of 8 heads, and a tenth of it at 64. Padding unequal short
ones into one batch costs as much in copies as it saves in calls.)
"""

from collections.abc import Iterator
from functools import lru_cache

import torch

from workers.attention.kernels.interface import Tensor, pad_heads
from workers.attention.layout import Block, Lengths

Run = tuple[int, slice, slice]  # batch size, rows of queries, rows of keys


class CpuFlash:
    """`_scaled_dot_product_flash_attention_for_cpu` over packed sequences."""

    name = "torch-cpu-flash"

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        width = v_SKE.size(-1)
        q_THD, k_SKD, v_SKE = pad_heads((q_THD, k_SKD, v_SKE))
        runs = equal_runs(block.queries.lengths, block.keys.lengths)
        results = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _batched(q_THD[rows], batch),
                _batched(k_SKD[keys], batch),
                _batched(v_SKE[keys], batch),
                0.0,
                block.causal,
                scale=scale,
            )
            for batch, rows, keys in runs
        ]
        if not results:
            return _empty(q_THD, width)
        out_THE = _joined([_packed(out) for out, _ in results], dim=0)
        lse_HT = _joined([lse.transpose(0, 1).flatten(1) for _, lse in results], dim=1)
        return out_THE[..., :width], lse_HT

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
        q_THD, k_SKD, v_SKE, out_THE, d_out_THE = pad_heads(
            (q_THD, k_SKD, v_SKE, out_THE, d_out_THE)
        )
        results = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _batched(d_out_THE[rows], batch),
                _batched(q_THD[rows], batch),
                _batched(k_SKD[keys], batch),
                _batched(v_SKE[keys], batch),
                _batched(out_THE[rows], batch),
                _batched_lse(lse_HT[:, rows], batch),
                0.0,
                block.causal,
                scale=scale,
            )
            for batch, rows, keys in equal_runs(block.queries.lengths, block.keys.lengths)
        ]
        if not results:
            return q_THD[..., :dim], k_SKD[..., :dim], v_SKE[..., :width]
        dq_THD, dk_SKD, dv_SKE = (
            _joined([_packed(gradient) for gradient in gradients], dim=0)
            for gradients in zip(*results, strict=True)
        )
        return dq_THD[..., :dim], dk_SKD[..., :dim], dv_SKE[..., :width]


@lru_cache(maxsize=4096)
def equal_runs(query_lengths: Lengths, key_lengths: Lengths) -> tuple[Run, ...]:
    """Runs of neighbours with equal lengths on both sides, as (batch, query rows, key rows)."""
    return tuple(_equal_runs(query_lengths, key_lengths))


def _equal_runs(query_lengths: Lengths, key_lengths: Lengths) -> Iterator[Run]:
    pairs = list(zip(query_lengths, key_lengths, strict=True))
    query_start = key_start = first = 0
    for last, pair in enumerate(pairs, start=1):
        if last < len(pairs) and pairs[last] == pair:
            continue
        batch = last - first
        query_end, key_end = query_start + batch * pair[0], key_start + batch * pair[1]
        yield batch, slice(query_start, query_end), slice(key_start, key_end)
        query_start, key_start, first = query_end, key_end, last


def _batched(x_THD: Tensor, batch: int) -> Tensor:
    """[B * S, H, D] as [B, H, S, D], without a copy."""
    return x_THD.unflatten(0, (batch, -1)).transpose(1, 2)


def _packed(x_BHSD: Tensor) -> Tensor:
    """[B, H, S, D] as [B * S, H, D]; no copy, for the operator lays its results out so."""
    return x_BHSD.transpose(1, 2).flatten(0, 1)


def _batched_lse(lse_HT: Tensor, batch: int) -> Tensor:
    return lse_HT.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _empty(q_THD: Tensor, width: int) -> tuple[Tensor, Tensor]:
    precision = torch.promote_types(q_THD.dtype, torch.float32)
    lse_HT = q_THD.new_empty((q_THD.size(1), 0), dtype=precision)
    return q_THD.new_empty((0, q_THD.size(1), width)), lse_HT
