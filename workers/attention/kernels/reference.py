"""Attention as it is written in textbooks: slow, plain, and what the others are tested against."""

from collections.abc import Iterator

import torch

from workers.attention.kernels.interface import Tensor
from workers.attention.layout import Block


class Reference:
    """Materialises every probability, one sequence at a time. O(T S) memory."""

    name = "reference"

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        precision = torch.promote_types(q_THD.dtype, torch.float32)
        heads, width = q_THD.size(1), v_SKE.size(-1)
        out_THE = q_THD.new_empty((q_THD.size(0), heads, width))
        lse_HT = q_THD.new_empty((heads, q_THD.size(0)), dtype=precision)
        for rows, keys in _segments(block):
            scores_HTS = _scores(q_THD[rows], k_SKD[keys], scale, causal=block.causal)
            lse_HT[:, rows] = scores_HTS.logsumexp(-1)
            p_HTS = (scores_HTS - lse_HT[:, rows, None]).exp()
            v_HSE = _heads_first(v_SKE[keys], heads)
            out_THE[rows] = (p_HTS @ v_HSE).transpose(0, 1).to(out_THE.dtype)
        return out_THE, lse_HT

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
        """See `Kernel.backward`.

        With p = exp(scores - lse): dv = p^T do, dp = do v^T, and through the softmax
        ds = p (dp - rowsum(do * out)); then dq = scale ds k and dk = scale ds^T q. Key-value heads
        sum over the query heads they serve.
        """
        heads, kv_heads = q_THD.size(1), k_SKD.size(1)
        dq, dk, dv = (torch.zeros_like(x) for x in (q_THD, k_SKD, v_SKE))
        for rows, keys in _segments(block):
            scores_HTS = _scores(q_THD[rows], k_SKD[keys], scale, causal=block.causal)
            p_HTS = (scores_HTS - lse_HT[:, rows, None]).exp()
            do_HTE = _heads_first(d_out_THE[rows], heads)
            dp_HTS = do_HTE @ _heads_first(v_SKE[keys], heads).transpose(1, 2)
            delta_HT = (do_HTE * _heads_first(out_THE[rows], heads)).sum(-1, keepdim=True)
            ds_HTS = p_HTS * (dp_HTS - delta_HT) * scale
            dq_HTD = ds_HTS @ _heads_first(k_SKD[keys], heads)
            dk_HSD = ds_HTS.transpose(1, 2) @ _heads_first(q_THD[rows], heads)
            dv_HSE = p_HTS.transpose(1, 2) @ do_HTE
            dq[rows] = dq_HTD.transpose(0, 1).to(dq.dtype)
            dk[keys] = _kv_heads(dk_HSD, kv_heads).to(dk.dtype)
            dv[keys] = _kv_heads(dv_HSE, kv_heads).to(dv.dtype)
        return dq, dk, dv


def _segments(block: Block) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys, one pair a segment."""
    row = key = 0
    for num_rows, num_keys in zip(block.queries.lengths, block.keys.lengths, strict=True):
        yield slice(row, row + num_rows), slice(key, key + num_keys)
        row, key = row + num_rows, key + num_keys


def _heads_first(x_TKD: Tensor, heads: int) -> Tensor:
    """[T, K, D] as [H, T, D] in the precision of the sums, each head repeated for its queries."""
    precision = torch.promote_types(x_TKD.dtype, torch.float32)
    return x_TKD.to(precision).transpose(0, 1).repeat_interleave(heads // x_TKD.size(1), 0)


def _kv_heads(x_HSD: Tensor, kv_heads: int) -> Tensor:
    """Sum [H, S, D] over the query heads of each key-value head: [S, K, D]."""
    return x_HSD.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)


def _scores(q_TKD: Tensor, k_SKD: Tensor, scale: float, *, causal: bool) -> Tensor:
    heads = q_TKD.size(1)
    scores_HTS = _heads_first(q_TKD, heads) @ _heads_first(k_SKD, heads).transpose(1, 2) * scale
    if causal:
        hidden_TS = torch.ones(scores_HTS.shape[1:], dtype=torch.bool, device=q_TKD.device).triu(1)
        scores_HTS = scores_HTS.masked_fill(hidden_TS, float("-inf"))
    return scores_HTS
