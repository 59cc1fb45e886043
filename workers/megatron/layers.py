"""Megatron's layers, told which microbatch they run.

Shape legend: T local tokens, H heads of this tensor rank, K key/value heads, D head dim.

Megatron's transformer layer and attention modules are subclassed, not copied: the parameters,
projections, norms, MLP and recompute are theirs. Only `forward` of the attention is ours, for
Megatron's reads its CP group from the module, where every microbatch needs its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from workers.attention.engine import Attention
from workers.attention.overlap_gqa import Rotate, attend_grouped
from workers.attention.overlap_mla import attend_latent
from workers.megatron.context import Microbatch, MicrobatchParams, entered


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with its weight marked for sequence parallelism.

    Megatron's wrapper refuses sequence parallelism. All it needs is that the weight's gradient,
    which each tensor rank sees for its tokens only, is summed: Megatron does so for parameters
    that carry this mark.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class MicrobatchLayer(TransformerLayer):
    """A transformer layer that makes its microbatch current while it runs, or runs again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, with the microbatch of `packed_seq_params` current."""
        params: MicrobatchParams = kwargs["packed_seq_params"]
        with entered(params.microbatch):
            return super().forward(*args, **kwargs)


class ContextParallelCore(MegatronModule):
    """Core attention, plugged in by spec: the engine, over the group of a microbatch.

    Attention is not one call here: the projections launch its all-to-alls as soon as each tensor
    is final, so the layer takes the engine from this module and drives it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        overlap: bool,  # noqa: FBT001 - Megatron passes the spec's parameters by keyword
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._overlap = overlap
        self._scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def over(self, microbatch: Microbatch) -> Attention:
        """Attention of every packed sequence over its whole group."""
        return Attention(
            lengths=microbatch.padded_lengths,
            groups=microbatch.groups,
            scale=self._scale,
            counters=microbatch.counters,
            overlap=self._overlap,
        )


def microbatch_of(params: MicrobatchParams) -> Microbatch:
    """The microbatch that came with Megatron's packed-sequence parameters."""
    if params.microbatch is None:
        raise RuntimeError("packed_seq_params carries no microbatch")
    return params.microbatch


class GroupedQueryAttention(SelfAttention):
    """Megatron's self-attention in the CP group of its microbatch."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002 - always causal per sequence
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: MicrobatchParams,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over the sequences of one microbatch.

        Args:
            hidden_states: [T, 1, hidden], or T / tensor of it under sequence parallelism.
            attention_mask: unused; attention is causal within each sequence.
            rotary_pos_emb: [longest sequence, 1, 1, D] angles.
            packed_seq_params: carries the microbatch.

        Returns:
            [T, 1, hidden] output, and the bias Megatron adds later.
        """
        attention = self.core_attention.over(microbatch_of(packed_seq_params))
        rotate = rotation(rotary_pos_emb, packed_seq_params, self.config)
        out_THD = attend_grouped(self, hidden_states, attention, rotate)
        return self.linear_proj(out_THD.reshape(out_THD.size(0), 1, -1))


class LatentAttention(MLASelfAttention):
    """Megatron's multi-latent attention in the CP group of its microbatch, with an output gate.

    Megatron has no gate for latent attention; ours is one column-parallel projection more.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        output_gate: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_gate: ColumnParallelLinear | None = None
        if output_gate:
            self.linear_gate = ColumnParallelLinear(
                config.hidden_size,
                config.num_attention_heads * config.v_head_dim,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=self.pg_collection.tp,
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002 - always causal per sequence
        *,
        packed_seq_params: MicrobatchParams,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over the sequences of one microbatch; see `GroupedQueryAttention.forward`."""
        attention = self.core_attention.over(microbatch_of(packed_seq_params))
        angles, magnitude = self._angles(packed_seq_params.max_seqlen_q)
        rotate = rotation(angles, packed_seq_params, self.config, magnitude)
        project_gate = _without_bias(self.linear_gate) if self.linear_gate is not None else None
        out_THE = attend_latent(self, hidden_states, attention, rotate, project_gate)
        return self.linear_proj(out_THE.reshape(out_THE.size(0), 1, -1))

    def _angles(self, longest: int) -> tuple[torch.Tensor, float]:
        """Rotary angles, and by how much YaRN scales the rotated part."""
        made = self.rotary_pos_emb(longest, packed_seq=True)
        return made if isinstance(made, tuple) else (made, 1.0)


def _without_bias(
    projection: ColumnParallelLinear,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """[T, 1, h] to [T, out] of one of Megatron's projections, which return their bias too."""
    return lambda hidden: projection(hidden)[0].squeeze(1)


def rotation(
    angles: torch.Tensor,
    params: MicrobatchParams,
    config: TransformerConfig,
    magnitude: float = 1.0,
) -> Rotate:
    """Megatron's rotary embedding at the positions this rank holds of each packed sequence.

    Args:
        angles: [longest sequence or more, 1, 1, D].
        params: where sequences begin, and the microbatch.
        config: how Megatron lays rotated pairs out.
        magnitude: a factor on the rotated part (YaRN).
    """
    group = microbatch_of(params).groups.cp

    def rotate(x_THD: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(
            x_THD,
            angles,
            config=config,
            cu_seqlens=params.cu_seqlens_q,
            mscale=magnitude,
            cp_group=group,
        )

    return rotate
