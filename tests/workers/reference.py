"""The truth the pool is held to: stock Megatron, one process, each sequence alone and unpadded.

It shares with the pool the canonical names, the seeded weights and Megatron's modules, and none
of: plans, packing, padding, zigzag shards, groups, our attention engine and layers, DDP, the
schedules, the loss function. Its attention is a plain softmax.
"""

from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec

from planner.pool import PoolShape
from tests.workers.pool import Outcome, Part, membership_of, run_pool
from workers import cpu_shim
from workers.groups import GroupRegistry
from workers.megatron import patches
from workers.megatron.config import transformer_config
from workers.megatron.initialise import initialise
from workers.megatron.naming import canonical_parameters
from workers.protocol import ModelSpec, StepPayload, TrainingSpec


class PlainAttention(MegatronModule):
    """Causal softmax attention of one sequence, written out: [s, 1, h, d] in, [s, 1, h * e] out."""

    def __init__(self, config: Any, softmax_scale: Any = None, k_channels: Any = None, **_: Any):
        super().__init__(config=config)
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x[:, 0].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        future = torch.ones(q.size(1), q.size(1), dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(future, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(q.size(1), 1, -1)


def reference(model: ModelSpec, training: TrainingSpec, payload: StepPayload) -> Outcome:
    """Loss and every gradient of one global batch, computed in a process of its own."""
    return run_pool(1, _reference, model, training, payload)[0]


def _reference(
    rank: int,
    world_size: int,
    port: int,
    model: ModelSpec,
    training: TrainingSpec,
    payload: StepPayload,
) -> Outcome:
    cpu_shim.install()
    patches.apply()
    pool = PoolShape(num_ranks=1, token_budget=1)
    registry = GroupRegistry(membership_of(rank, world_size, port, training), pool, training)
    gpt = _stock_model(model, training)
    parameters = canonical_parameters([gpt])
    initialise(parameters, seed=training.seed, num_layers=model.num_layers)
    loss, count = _loss(gpt, payload)
    (loss / count).backward()
    parts = [
        Part(item.name, item.parameter.grad.to(torch.float64).numpy(), None, 0)
        for item in parameters
    ]
    del gpt, parameters
    registry.close()
    return Outcome(float(loss.detach()) / count, count, parts)


def _loss(gpt: GPTModel, payload: StepPayload) -> tuple[torch.Tensor, int]:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for first, last in zip(payload.token_offsets, payload.token_offsets[1:], strict=False):
        ids = torch.tensor(np.asarray(payload.tokens[first:last]), dtype=torch.int64)[None]
        labels = torch.cat([ids[:, 1:], torch.zeros(1, 1, dtype=torch.int64)], 1)
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
        losses = gpt(ids, torch.arange(ids.size(1))[None], mask, labels=labels)
        total = total + losses[0, :-1].sum() + 0.0 * losses[0, -1]
        count += ids.size(1) - 1
    return total, count


def _stock_model(model: ModelSpec, training: TrainingSpec) -> GPTModel:
    is_latent = model.attention == "mla"
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts or None,
        qk_layernorm=is_latent,
        multi_latent_attention=is_latent,
        normalization="RMSNorm",
    )
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(module=PlainAttention)
    dtype = {"float64": torch.float64, "float32": torch.float32}[training.dtype]
    return GPTModel(
        config=transformer_config(model, training),
        transformer_layer_spec=spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.context,
        position_embedding_type="none" if is_latent else "rope",
        rotary_base=int(model.rope_base),
    ).to(dtype)
