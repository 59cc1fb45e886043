"""What the driver and the workers say to each other: frozen values, no behaviour, no Ray."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The model to build; every rank gets the same one.

    `attention` is "gqa" (dense grouped-query attention) or "mla" (gated multi-head latent
    attention). Lengths of heads are in elements; `num_experts` 0 is a dense feed-forward.
    `rope_scaling_factor` above 1 makes MLA use YaRN, stretched by it to `context`.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context: int
    attention: Literal["gqa", "mla"] = "gqa"
    head_dim: int | None = None
    rope_base: float = 10_000.0
    rope_scaling_factor: float = 1.0
    output_gate: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_rope_dim: int = 0
    v_head_dim: int = 0
    num_experts: int = 0
    expert_top_k: int = 2
    expert_ffn_hidden_size: int = 0
    shared_expert_ffn_hidden_size: int = 0
    aux_loss_coeff: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """How one worker trains: optimizer, precision, seeds, recompute and parallel sizes."""

    seed: int
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    distributed_optimizer: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    chunks: int = 1
    expert: int = 1
    overlap_all_to_all: bool = True
    trace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One worker's place in one generation of the pool.

    `world_size` = num_ranks * tensor * pipeline processes; `rank` is the process's place among
    them in Megatron's order (tensor fastest, then HDP, then pipeline). The store at
    `store_host:store_port` outlives every worker; a generation uses its own prefix in it.

    A collective may take `timeout_s`, which is long, since whoever hangs on a lost peer is freed
    from outside. Nobody can be freed from the meeting itself, so that has `join_timeout_s`.
    """

    generation: int
    rank: int
    world_size: int
    num_ranks: int
    store_host: str
    store_port: int
    timeout_s: float = 30.0
    join_timeout_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPayload:
    """The step's plan and data: put into the object store once, read by every worker.

    Args:
        plan: all microbatches of the step.
        sequence_ids: [N] int64, stable across runs, in the plan's batch order.
        tokens: [sum of lengths] int32, the sequences one after the other.
        token_offsets: [N + 1] int64, sequence i is `tokens[token_offsets[i]:token_offsets[i + 1]]`.
    """

    plan: Plan
    sequence_ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    token_offsets: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommand:
    """Train one step. Workers check all of it before their first collective."""

    step: int
    generation: int
    plan_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchStats:
    """What one rank measured in one microbatch. Times are in seconds of wall clock or of CPU."""

    microbatch: int
    degree: int
    ulysses: int
    tokens: int
    wall_s: float = 0.0
    cpu_s: float = 0.0
    kernel_s: float = 0.0
    exposed_wait_s: float = 0.0
    bytes_sent: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One rank's report of one applied (or refused) step.

    `loss_sum` and `token_count` are global, the same on every rank; `loss` is their quotient.
    `nonfinite_sequences` are ids whose loss was not finite on this rank; if any rank has one,
    or the global loss or gradient norm is not finite, `applied` is False on every rank.
    `trace_events` are Chrome-trace slices (only when tracing).
    """

    step: int
    generation: int
    rank: int
    applied: bool
    loss_sum: float
    token_count: int
    grad_norm: float
    lr: float
    step_s: float
    peak_bytes: int
    nonfinite_sequences: tuple[int, ...] = ()
    microbatches: tuple[MicrobatchStats, ...] = ()
    trace_events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One written checkpoint shard: its path under the checkpoint folder, size and checksum."""

    path: str
    num_bytes: int
    blake2b: str
