"""Grouped-query attention whose projections hide its all-to-alls (HyDra paper, section 5.2.2).

Megatron projects query, key and value in one matmul, so all three become final at once and only
rotations could hide their all-to-alls. Where there are all-to-alls, the weight is split into its
parts instead, and each part's matmul runs while the previous tensor travels:

    query, rotate, launch | value, launch | key, rotate, launch | gate | wait for all three

Shape legend: T local tokens, H query heads and K key-value heads of this tensor rank, D head dim,
h hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch.nn.functional import linear

from workers.attention.all_to_all import marked
from workers.attention.engine import Attention

Tensor = torch.Tensor
Rotate = Callable[[Tensor], Tensor]
Project = Callable[[str], Tensor]  # "query", "key", "value" or "gate", to [T, heads, D], normed


def attend_grouped(layer: Any, hidden: Tensor, attention: Attention, rotate: Rotate) -> Tensor:
    """Project, rotate and attend; the output projection is the caller's.

    Args:
        layer: Megatron's SelfAttention, whose projection and norms are used.
        hidden: [T, 1, h], or T / tensor of it under sequence parallelism.
        attention: this layer's attention over its microbatch.
        rotate: rotary embedding of [T, heads, D] for this microbatch's positions.

    Returns:
        [T, H, D], gated if the layer is.
    """
    is_split = attention.groups.inner is not None and _is_separable(layer)
    project = _separately(layer, hidden) if is_split else _at_once(layer, hidden)
    query = attention.launch_query(rotate(project("query")))
    value = attention.launch_value(project("value"))
    key = attention.launch_key(rotate(project("key")))
    if not layer.config.attention_output_gate:
        return attention.attend(query, key, value)
    gate_THD = gate_of(project("gate"), attention)
    return apply_gate(attention.attend(query, key, value), gate_THD)


def gate_of(logits: Tensor, attention: Attention) -> Tensor:
    """The sigmoid gate, in at least float32; nothing it needs travels, so it hides what does."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.sigmoid(marked(wide, attention.counters, "gate"))


def apply_gate(out_THD: Tensor, gate_THD: Tensor) -> Tensor:
    """Each element of the heads' output times its gate, in the output's precision."""
    return (out_THD * gate_THD).to(out_THD.dtype)


def _is_separable(layer: Any) -> bool:
    """Whether this rank's slice of the weight holds whole groups of heads and there is no bias."""
    tensor_ranks = layer.linear_qkv.tp_group.size()
    return layer.linear_qkv.bias is None and layer.config.num_query_groups >= tensor_ranks


def _at_once(layer: Any, hidden: Tensor) -> Project:
    """Megatron's one matmul."""
    gated = layer.config.attention_output_gate
    parts = layer.get_query_key_value_tensors(hidden, output_gate=gated)
    names = ("query", "key", "value", "gate")[: len(parts)]
    by_name = {name: part.squeeze(1) for name, part in zip(names, parts, strict=True)}
    return by_name.__getitem__


def _separately(layer: Any, hidden: Tensor) -> Project:
    """One matmul for each part of the weight, over an input that is gathered once.

    Megatron's weight holds, group of heads after group, the rows of its queries, then of its
    gates if there are any, then of its key, then of its value.
    """
    whole_Th = _whole_input(layer.linear_qkv, hidden).squeeze(1)
    dim, groups = layer.hidden_size_per_attention_head, layer.num_query_groups_per_partition
    queries = layer.num_attention_heads_per_partition // groups
    gates = {"gate": queries} if layer.config.attention_output_gate else {}
    rows = {"query": queries, **gates, "key": 1, "value": 1}
    grouped = layer.linear_qkv.weight.unflatten(0, (groups, sum(rows.values()), dim))
    weights = dict(zip(rows, grouped.split(list(rows.values()), dim=1), strict=True))
    norms = {"query": layer.q_layernorm, "key": layer.k_layernorm}

    def project(name: str) -> Tensor:
        x_THD = linear(whole_Th, weights[name].flatten(0, 2)).unflatten(-1, (-1, dim))
        norm = norms.get(name)
        return x_THD if norm is None else norm(x_THD)

    return project


def _whole_input(projection: Any, hidden: Tensor) -> Tensor:
    """All T tokens on every tensor rank; backward sums the ranks' gradients."""
    group = projection.tp_group
    if projection.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, group=group)
    return copy_to_tensor_model_parallel_region(hidden, group=group)
