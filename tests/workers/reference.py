"""The truth the pool is held to: stock Megatron, one process, each sequence alone and unpadded.

It shares with the pool the canonical names, the seeded weights and Megatron's modules, and none
of: plans, packing, padding, zigzag shards, groups, our attention engine and layers, DDP, the
schedules, the loss function. Its attention is a plain softmax.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from planner.pool import PoolShape
from tests.workers.pool import Outcome, Part, membership_of, run_pool
from workers import cpu_shim
from workers.groups import GroupRegistry
from workers.megatron import patches
from workers.megatron.config import transformer_config
from workers.megatron.initialise import initialise
from workers.megatron.naming import NamedParameter, canonical_parameters
from workers.protocol import ModelSpec, StepPayload, TrainingSpec


class PlainAttention(MegatronModule):
    """Causal softmax attention of one sequence, written out: [s, 1, h, d] in, [s, 1, h * e] out."""

    def __init__(self, config: Any, softmax_scale: Any = None, k_channels: Any = None, **_: Any):
        super().__init__(config=config)
        self.scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5
        self.gate: torch.Tensor | None = None

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x[:, 0].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        future = torch.ones(q.size(1), q.size(1), dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(future, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(q.size(1), 1, -1)
        return out if self.gate is None else out * self.gate


class PlainGatedAttention(MLASelfAttention):
    """Stock latent attention with a sigmoid gate on its heads' output."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        width = config.num_attention_heads * config.v_head_dim
        self.linear_gate = torch.nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.core_attention.gate = torch.sigmoid(self.linear_gate(hidden_states))
        return super().forward(hidden_states, *args, **kwargs)


def reference(model: ModelSpec, training: TrainingSpec, payloads: list[StepPayload]) -> Outcome:
    """Loss and gradients of the first batch, and the weights after a step on each batch.

    Computed in a process of its own, with torch's own optimizer.
    """
    alone = replace(
        training,
        tensor=1,
        pipeline=1,
        chunks=1,
        expert=1,
        sequence_parallel=False,
        recompute="none",
        distributed_optimizer=False,
    )
    return run_pool(1, _reference, model, alone, payloads)[0]


def _reference(
    rank: int,
    world_size: int,
    port: int,
    model: ModelSpec,
    training: TrainingSpec,
    payloads: list[StepPayload],
) -> Outcome:
    cpu_shim.install()
    patches.apply()
    pool = PoolShape(num_ranks=1, token_budget=1)
    GroupRegistry(membership_of(rank, world_size, port, training), pool, training)
    model_parallel_cuda_manual_seed(training.seed)
    gpt = _stock_model(model, training)
    parameters = canonical_parameters([gpt])
    initialise(parameters, seed=training.seed, num_layers=model.num_layers)
    optimizer = torch.optim.AdamW(
        [item.parameter for item in parameters],
        lr=training.lr,
        betas=(training.beta1, training.beta2),
        eps=training.eps,
        weight_decay=0.0,
    )
    outcomes = []
    for payload in payloads:
        optimizer.zero_grad()
        loss, count = _loss(gpt, payload)
        # Megatron attaches the MoE loss for a sum over tokens, and scales all by the count.
        loss.backward()
        for item in parameters:
            item.parameter.grad /= count
        gradients = _copies(parameters, lambda parameter: parameter.grad)
        optimizer.step()
        outcomes.append(Outcome(float(loss.detach()) / count, count, gradients))
    return replace(outcomes[0], weights=_copies(parameters, lambda parameter: parameter.data))


def _copies(parameters: list[NamedParameter], of: Callable[[Any], torch.Tensor]) -> list[Part]:
    return [
        Part(item.name, of(item.parameter).to(torch.float64).clone().numpy(), None, 0)
        for item in parameters
    ]


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
    attention = spec.submodules.self_attention
    attention.submodules.core_attention = ModuleSpec(module=PlainAttention)
    if is_latent and model.output_gate:
        attention.module = PlainGatedAttention
    dtype = {"float64": torch.float64, "float32": torch.float32}[training.dtype]
    return GPTModel(
        config=transformer_config(model, training),
        transformer_layer_spec=spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.context,
        position_embedding_type="none" if is_latent else "rope",
        rotary_base=int(model.rope_base),
    ).to(dtype)
