"""Gated latent attention whose projections hide its all-to-alls (HyDra paper, section 5.2.2).

The query goes first, right after its rotation, behind the key-value down- and up-projection. The
value is final once the up-projection's output is split, and travels while the key is rotated and
put together. The key goes last, behind the gate's projection. Then all three are waited for.

Shape legend: T local tokens, H heads of this tensor rank, D = N + R head dim of queries and keys
(N not rotated, R rotated), E head dim of values, h hidden size, L rank of a compressed tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)

from workers.attention.engine import Attention
from workers.attention.overlap_gqa import Rotate, apply_gate, gate_of

Tensor = torch.Tensor
ProjectGate = Callable[[Tensor], Tensor]


def attend_latent(
    layer: Any,
    hidden: Tensor,
    attention: Attention,
    rotate: Rotate,
    project_gate: ProjectGate | None = None,
) -> Tensor:
    """Compress, project, rotate and attend; the output projection is the caller's.

    Args:
        layer: Megatron's MLASelfAttention, whose projections and norms are used.
        hidden: [T, 1, h], or T / tensor of it under sequence parallelism.
        attention: this layer's attention over its microbatch.
        rotate: rotary embedding of [T, heads, R] for this microbatch's positions.
        project_gate: from `hidden` to [T, H * E] logits of the output gate; None for no gate.

    Returns:
        [T, H, E].
    """
    query = attention.launch_query(_query(layer, hidden, rotate))
    compressed_TL, k_rotary_TR = _compressed_key_value(layer, hidden)
    k_THN, v_THE = _up_projected(layer, compressed_TL)
    value = attention.launch_value(v_THE)
    key = attention.launch_key(_key(k_THN, k_rotary_TR, rotate))
    if project_gate is None:
        return attention.attend(query, key, value)
    gate_THE = gate_of(project_gate(hidden).view(v_THE.shape), attention)
    return apply_gate(attention.attend(query, key, value), gate_THE)


def _query(layer: Any, hidden: Tensor, rotate: Rotate) -> Tensor:
    """[T, H, D], its last R elements rotated."""
    config = layer.config
    if config.q_lora_rank is None:
        q, _ = layer.linear_q_proj(hidden)
    else:
        compressed, _ = layer.linear_q_down_proj(hidden)
        if compressed.size(-1) != config.q_lora_rank:
            compressed = _gathered(layer, compressed)
            if config.sequence_parallel:
                compressed = scatter_to_sequence_parallel_region(compressed, _tensor_group(layer))
        q, _ = layer.linear_q_up_proj(layer.q_layernorm(compressed))
    q_THD = q.squeeze(1).unflatten(-1, (-1, layer.q_head_dim))
    q_THN, q_THR = q_THD.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
    return torch.cat([q_THN, rotate(q_THR)], dim=-1)


def _compressed_key_value(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The latent of keys and values, and the rotary part of the key, which all heads share."""
    config, group = layer.config, _tensor_group(layer)
    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    combined, _ = layer.linear_kv_down_proj(hidden)
    is_sharded = combined.size(-1) != sum(sizes)
    if is_sharded:
        combined = _gathered(layer, combined)
    compressed, k_rotary = combined.split(sizes, dim=-1)
    if is_sharded:
        k_rotary = _SumGradient.apply(k_rotary, group)
        if config.sequence_parallel:
            compressed = scatter_to_sequence_parallel_region(compressed, group)
    return layer.kv_layernorm(compressed), k_rotary.squeeze(1)


def _up_projected(layer: Any, compressed: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H, N] part of the key that is not rotated, and [T, H, E] value."""
    sizes = [layer.config.qk_head_dim, layer.config.v_head_dim]
    kv, _ = layer.linear_kv_up_proj(compressed)
    k_THN, v_THE = kv.squeeze(1).unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
    return k_THN, v_THE


def _key(k_THN: Tensor, k_rotary_TR: Tensor, rotate: Rotate) -> Tensor:
    """[T, H, D]: every head's own part, then the rotated part that they share."""
    k_T1R = rotate(k_rotary_TR.unsqueeze(1))
    return torch.cat([k_THN, k_T1R.expand(-1, k_THN.size(1), -1)], dim=-1)


def _gathered(layer: Any, x: Tensor) -> Tensor:
    return gather_from_tensor_model_parallel_region(x, _tensor_group(layer))


def _tensor_group(layer: Any) -> dist.ProcessGroup:
    return layer.pg_collection.tp


class _SumGradient(torch.autograd.Function):
    """Identity whose backward sums over tensor ranks.

    Each tensor rank's heads use the shared rotary part of the key, so its gradient is their sum.
    Nothing else sums it: the gather's backward only cuts out a slice. (megatron-core's own
    identity of this kind drops the sum of a gradient that is not contiguous.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        total = d_x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
