"""Builds this process's part of the model: Megatron's GPT with our layers plugged in by spec."""

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from workers.megatron.config import transformer_config
from workers.megatron.layers import (
    ContextParallelCore,
    GroupedQueryAttention,
    LatentAttention,
    MicrobatchLayer,
    RMSNorm,
)
from workers.megatron.router import SequenceRouter
from workers.protocol import ModelSpec, TrainingSpec


def build_chunks(model: ModelSpec, training: TrainingSpec) -> list[GPTModel]:
    """The virtual-pipeline chunks of this process, weights not yet filled.

    Needs Megatron's parallel state of the generation. A model without virtual pipelining is one
    chunk.
    """
    model_parallel_cuda_manual_seed(training.seed, force_reset_rng=True)
    config = transformer_config(model, training)
    stages = range(training.chunks) if training.chunks > 1 else (None,)
    return [_build_chunk(model, training, config, stage) for stage in stages]


def _build_chunk(
    model: ModelSpec, training: TrainingSpec, config: TransformerConfig, stage: int | None
) -> GPTModel:
    layers = get_num_layers_to_build(config, vp_stage=stage)
    spec = TransformerBlockSubmodules(
        layer_specs=[_layer_spec(model, training)] * layers, layer_norm=RMSNorm
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.context,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="none" if model.attention == "mla" else "rope",
        rotary_base=int(model.rope_base),
        vp_stage=stage,
    ).to(_device())


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _layer_spec(model: ModelSpec, training: TrainingSpec) -> ModuleSpec:
    is_latent = model.attention == "mla"
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts or None,
        qk_layernorm=is_latent,
        multi_latent_attention=is_latent,
        normalization="RMSNorm",
    )
    spec.module = MicrobatchLayer
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    _plug_attention(layer.self_attention, model, training)
    if model.num_experts:
        layer.mlp.submodules.router = SequenceRouter
    return spec


def _plug_attention(attention: ModuleSpec, model: ModelSpec, training: TrainingSpec) -> None:
    if model.attention == "mla":
        attention.module = LatentAttention
        attention.params = {**attention.params, "output_gate": model.output_gate}
        attention.submodules.q_layernorm = attention.submodules.kv_layernorm = RMSNorm
    else:
        attention.module = GroupedQueryAttention
    attention.submodules.core_attention = ModuleSpec(
        module=ContextParallelCore, params={"overlap": training.overlap_all_to_all}
    )
