"""The sections of a recipe. Each field's description is its documentation."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of a recipe: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(Section):
    """Where the sequences come from."""

    corpus: str | None = Field(
        default=None, description="Tokenised Parquet corpus; absent: prepared from `sources`."
    )
    sources: tuple[str, ...] = Field(
        default=(), description="Folders, text, JSONL or Parquet files, or `python-stdlib`."
    )
    tokenizer: str = Field(
        default="bytes", description="`bytes`, or the path of a Hugging Face tokenizer.json."
    )
    text_column: str = Field(default="text", description="The column of JSONL and Parquet sources.")
    on_too_long: Literal["split", "drop"] = Field(
        default="split", description="What to do with a document longer than the context."
    )

    @model_validator(mode="after")
    def _has_an_origin(self) -> Self:
        if self.corpus is None and not self.sources:
            raise ValueError("name a corpus, or the sources to prepare one from")
        return self


class ModelSection(Section):
    """The model: `workers.protocol.ModelSpec` without what the data decides."""

    num_layers: Count = Field(description="Transformer layers.")
    hidden_size: Count = Field(description="Width of the residual stream.")
    ffn_hidden_size: Count = Field(description="Width of the dense SwiGLU feed-forward.")
    num_heads: Count = Field(description="Query heads.")
    num_kv_heads: Count = Field(description="Key and value heads; as many as num_heads for mla.")
    attention: Literal["gqa", "mla"] = Field(
        default="gqa", description="Grouped-query or multi-head latent attention."
    )
    head_dim: Count | None = Field(
        default=None, description="Width of a head (gqa); absent: hidden_size / num_heads."
    )
    rope_base: Positive = Field(default=10_000.0, description="Base of the rotary embedding.")
    rope_scaling_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=1.0, description="YaRN stretch of the rotary embedding, mla only; 1: none."
    )
    output_gate: bool = Field(default=False, description="Gate the attention's output.")
    q_lora_rank: CountOrZero = Field(default=0, description="Rank of mla's queries; 0: full.")
    kv_lora_rank: CountOrZero = Field(default=0, description="Rank of mla's keys and values.")
    qk_head_dim: CountOrZero = Field(default=0, description="Width of mla's heads before rotary.")
    qk_rope_dim: CountOrZero = Field(default=0, description="Rotary width of mla's heads.")
    v_head_dim: CountOrZero = Field(default=0, description="Width of mla's value heads.")
    num_experts: CountOrZero = Field(default=0, description="Experts a layer; 0: dense.")
    expert_top_k: Count = Field(default=2, description="Experts that work on a token.")
    expert_ffn_hidden_size: CountOrZero = Field(default=0, description="Width of one expert.")
    shared_expert_ffn_hidden_size: CountOrZero = Field(
        default=0, description="Width of the expert every token visits; 0: none."
    )
    aux_loss_coeff: NotNegative = Field(
        default=0.0, description="Weight of the router's load-balancing loss."
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.attention == "gqa" and self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_heads "
                f"({self.num_heads}), or give head_dim"
            )
        return self

    @model_validator(mode="after")
    def _latent_attention_is_whole(self) -> Self:
        needed = ("kv_lora_rank", "qk_head_dim", "qk_rope_dim", "v_head_dim")
        missing = [name for name in needed if not getattr(self, name)]
        if self.attention == "mla" and missing:
            raise ValueError(f"attention: mla also needs {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _experts_are_whole(self) -> Self:
        if not self.num_experts:
            return self
        if not self.expert_ffn_hidden_size:
            raise ValueError("num_experts above 0 also needs expert_ffn_hidden_size")
        if self.expert_top_k > self.num_experts:
            raise ValueError(
                f"expert_top_k ({self.expert_top_k}) exceeds num_experts ({self.num_experts})"
            )
        return self


class OptimizerSection(Section):
    """Megatron's optimizer and its learning-rate schedule."""

    name: Literal["adam", "sgd"] = Field(default="adam", description="adam is AdamW.")
    lr: Positive = Field(default=1e-3, description="Peak learning rate.")
    min_lr: NotNegative = Field(default=0.0, description="Learning rate after the decay.")
    warmup_steps: CountOrZero = Field(default=0, description="Steps of linear warm-up.")
    decay_steps: CountOrZero = Field(
        default=0, description="Step at which cosine decay ends; 0: no decay."
    )
    weight_decay: NotNegative = Field(default=0.0, description="Decoupled weight decay.")
    beta1: Fraction = Field(default=0.9, description="adam's first momentum; sgd has none.")
    beta2: Fraction = Field(default=0.95, description="adam's second momentum.")
    eps: Positive = Field(default=1e-8, description="adam's epsilon.")
    clip_grad: NotNegative = Field(default=1.0, description="Largest gradient norm; 0: no limit.")
    distributed_optimizer: bool = Field(
        default=False,
        description="Shard optimizer state over the ranks; needs elastic.max_failures 0.",
    )

    @model_validator(mode="after")
    def _rates_are_ordered(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) exceeds lr ({self.lr})")
        if self.decay_steps and self.decay_steps < self.warmup_steps:
            raise ValueError(
                f"decay_steps ({self.decay_steps}) ends before warmup_steps ({self.warmup_steps})"
            )
        return self


class ParallelSection(Section):
    """The axes beside context parallelism, with fixed sizes."""

    tensor: Count = Field(default=1, description="Tensor-parallel size.")
    sequence_parallel: bool = Field(
        default=False, description="Split norms and residuals over tensor ranks too."
    )
    pipeline: Count = Field(default=1, description="Pipeline stages.")
    chunks: Count = Field(
        default=1, description="Virtual pipeline chunks a stage (interleaved 1F1B)."
    )
    expert: Count = Field(default=1, description="HDP ranks that share one set of experts.")

    @model_validator(mode="after")
    def _axes_make_sense(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs tensor above 1")
        if self.chunks > 1 and self.pipeline == 1:
            raise ValueError("chunks above 1 need pipeline above 1")
        return self

    @property
    def processes_per_rank(self) -> int:
        """Processes behind one HDP rank: TP x PP."""
        return self.tensor * self.pipeline

    @property
    def scale_unit(self) -> int:
        """Processes that are added or removed as one: those of `expert` HDP ranks."""
        return self.expert * self.processes_per_rank


class CheckpointSection(Section):
    """When and where the run saves itself."""

    every_steps: CountOrZero = Field(default=0, description="0: only on demand and at the end.")
    keep: Count = Field(default=2, description="Newest checkpoints to keep.")
    path: str | None = Field(
        default=None,
        description="Folder or fsspec URL; absent: `checkpoints` in the run directory.",
    )


class ElasticSection(Section):
    """How the pool may change while the run goes on. Numbers are worker processes."""

    min: Count | None = Field(
        default=None,
        description="Fewest workers to train with; absent: what the longest sequence needs.",
    )
    max: Count | None = Field(default=None, description="Most workers; absent: no limit.")
    standbys: CountOrZero = Field(default=0, description="Workers kept loaded and idle as spares.")
    follow_cluster: bool = Field(
        default=False, description="Grow and shrink with the Ray cluster's capacity."
    )
    heartbeat_s: Positive = Field(
        default=2.0, description="A worker silent for five of these is dead."
    )
    max_failures: CountOrZero = Field(default=8, description="Failures before the run gives up.")
    failure_window_s: Positive = Field(
        default=3600.0, description="Only failures this recent count."
    )
    grow_timeout_s: Positive = Field(
        default=120.0, description="New workers must be loaded within this."
    )
    wait_timeout_s: Positive = Field(default=600.0, description="How long to wait below `min`.")

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) exceeds max ({self.max})")
        return self


class CostSection(Section):
    """Coefficients of the planner's cost model; those absent follow from the model's shape."""

    preset: Literal["dense", "moe", "mla"] | None = Field(
        default=None, description="Start from a published model's coefficients instead."
    )
    quadratic_s: Positive | None = Field(
        default=None, description="Seconds of attention per token squared, one stage's layers."
    )
    linear_s: NotNegative | None = Field(
        default=None, description="Seconds of everything else per token, one stage's layers."
    )
    fixed_s: NotNegative | None = Field(default=None, description="Seconds per microbatch.")
    latency_s: NotNegative | None = Field(
        default=None, description="Seconds each sequence adds at degrees above 1."
    )
    ranks_per_node: Count | None = Field(default=None, description="Accelerators of a node.")
    intra_node_bytes_per_s: Positive | None = Field(
        default=None, description="Bandwidth between two of them."
    )
    inter_node_bytes_per_s: Positive | None = Field(
        default=None, description="Bandwidth between two on different nodes."
    )
    exposed_alltoall: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Share of all-to-all time that nothing hides."
    )
