"""From our ModelSpec and TrainingSpec to Megatron's configuration."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from planner.errors import InputError
from workers.protocol import ModelSpec, TrainingSpec

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def check(model: ModelSpec, training: TrainingSpec) -> None:
    """Refuse combinations that Megatron would fail on later, or get wrong.

    Raises:
        InputError: two values do not go together.
    """
    _divides(training.tensor, model.vocab_size, "vocab_size", "tensor ranks")
    _divides(training.tensor, model.num_heads, "num_heads", "tensor ranks")
    if model.attention == "gqa" and model.output_gate and training.tensor > model.num_kv_heads:
        raise InputError(
            "Megatron cuts no output gate to more tensor ranks than key-value heads",
            value=f"tensor {training.tensor}, num_kv_heads {model.num_kv_heads}",
            remedy="Set output_gate: false, or use fewer tensor ranks.",
        )
    stages = training.pipeline * training.chunks
    _divides(stages, model.num_layers, "num_layers", "pipeline stages times chunks")
    if model.num_experts:
        _divides(training.expert, model.num_experts, "num_experts", "expert ranks")
    if training.distributed_optimizer and (
        training.optimizer != "adam" or training.dtype == "float64"
    ):
        raise InputError(
            "the distributed optimizer supports adam in float32 or bfloat16 only",
            value=f"{training.optimizer}, {training.dtype}",
            remedy="Set distributed_optimizer: false, or optimizer: adam and another dtype.",
        )
    if model.num_experts and training.tensor > 1 and not training.sequence_parallel:
        raise InputError(
            "experts with tensor parallelism need sequence parallelism",
            value=f"tensor {training.tensor}, sequence_parallel false",
            remedy="Set parallel.sequence_parallel: true.",
        )


def _divides(divisor: int, value: int, name: str, what: str) -> None:
    if value % divisor:
        raise InputError(
            f"{name} must be a multiple of the {what}",
            value=value,
            limit=f"a multiple of {divisor}",
            remedy=f"Change {name} or the parallel sizes.",
        )


def transformer_config(model: ModelSpec, training: TrainingSpec) -> TransformerConfig:
    """Megatron's configuration: one CP rank (CP is ours, per microbatch), no fusions.

    Weights are filled by `initialise`; Megatron's own initialisation still marks which of them
    are split over tensor ranks, so it must run.
    """
    kind = MLATransformerConfig if model.attention == "mla" else TransformerConfig
    return kind(
        **_shape(model),
        **(_latent(model) if model.attention == "mla" else _grouped(model)),
        **(_experts(model, training) if model.num_experts else {}),
        **_parallel(training),
        **_recompute(model, training),
        bf16=training.dtype == "bfloat16",
        params_dtype=DTYPES[training.dtype],
        pipeline_dtype=DTYPES[training.dtype],
    )


def _leave_unfilled(weight: torch.Tensor) -> None:
    """Megatron's hook for filling a weight."""


def _shape(model: ModelSpec) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "init_method": _leave_unfilled,
        "output_layer_init_method": _leave_unfilled,
        "embedding_init_method": _leave_unfilled,
    }


def _grouped(model: ModelSpec) -> dict[str, Any]:
    return {
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim or model.hidden_size // model.num_heads,
        "attention_output_gate": model.output_gate,
    }


def _latent(model: ModelSpec) -> dict[str, Any]:
    return {
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_head_dim,
        "qk_pos_emb_head_dim": model.qk_rope_dim,
        "v_head_dim": model.v_head_dim,
        "rotary_base": model.rope_base,
        "rope_type": "yarn" if model.rope_scaling_factor > 1 else "rope",
        "rotary_scaling_factor": model.rope_scaling_factor,
        "original_max_position_embeddings": int(model.context / model.rope_scaling_factor),
    }


def _experts(model: ModelSpec, training: TrainingSpec) -> dict[str, Any]:
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.expert_top_k,
        "moe_ffn_hidden_size": model.expert_ffn_hidden_size or model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size or None,
        "moe_router_load_balancing_type": "aux_loss" if model.aux_loss_coeff else "none",
        "moe_aux_loss_coeff": model.aux_loss_coeff,
        "moe_router_dtype": "fp64" if training.dtype == "float64" else "fp32",
    }


def _parallel(training: TrainingSpec) -> dict[str, Any]:
    interleaved = training.chunks > 1
    return {
        "tensor_model_parallel_size": training.tensor,
        "sequence_parallel": training.sequence_parallel and training.tensor > 1,
        "pipeline_model_parallel_size": training.pipeline,
        "virtual_pipeline_model_parallel_size": training.chunks if interleaved else None,
        "expert_model_parallel_size": training.expert,
        "expert_tensor_parallel_size": 1,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # lengths that vary need it, dense models too
        "calculate_per_token_loss": True,
        "deallocate_pipeline_outputs": True,
        # Interleaved stages whose previous and next stage are the same process exchange shapes
        # out of order unless sends and receives are separate operations.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": False,
    }


def _recompute(model: ModelSpec, training: TrainingSpec) -> dict[str, Any]:
    """Selective recompute redoes the feed-forward and keeps attention.

    At long context attention is most of the work, and flash attention keeps little; the
    feed-forward is the larger part of the memory and cheap to redo.
    """
    if training.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if training.recompute == "selective":
        modules = ["moe"] if model.num_experts else ["mlp"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}
