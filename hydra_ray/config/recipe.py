"""The whole recipe, and its conversion to the types the planner and the workers take."""

import hashlib
import json
from dataclasses import replace
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from hydra_ray.config.cost import attention_shape, cost_model
from hydra_ray.config.sections import (
    CheckpointSection,
    CostSection,
    Count,
    CountOrZero,
    DataSection,
    ElasticSection,
    ModelSection,
    NotNegative,
    OptimizerSection,
    ParallelSection,
    Section,
)
from planner.cost import CostModel
from planner.errors import InputError
from planner.factorize import largest_degree
from planner.pool import PoolShape
from workers.protocol import ModelSpec, TrainingSpec

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


def _split(value: object) -> object:
    """One message for both of the forms a split may have."""
    if value in ("auto", "ulysses", "ring"):
        return value
    if isinstance(value, list | tuple) and len(value) == 2:
        ulysses, ring = value
        if type(ulysses) is int and type(ring) is int and min(ulysses, ring) > 0:
            return ulysses, ring
    raise ValueError(f"must be auto, ulysses, ring or [u, r] of whole numbers, got {value!r}")


Split = Annotated[Literal["auto", "ulysses", "ring"] | tuple[int, int], BeforeValidator(_split)]


def _require_whole_units(key: str, size: int, unit: int) -> None:
    if size % unit == 0:
        return
    below, above = size // unit * unit, -(-size // unit) * unit
    legal = f"{below} or {above}" if below else f"{above}"
    raise ValueError(
        f"{key} ({size}) must be a multiple of tensor x pipeline x expert ({unit}); "
        f"the nearest legal size is {legal}"
    )


class Recipe(Section):
    """One training run. A key that is not listed here is an error."""

    name: Name = Field(
        default="run", description="The run's name when the command line gives none."
    )
    storage_path: str = Field(default="runs", description="Folder of run directories.")
    seed: CountOrZero = Field(default=0, description="Decides weights and the order of data.")
    steps: Count = Field(description="Optimizer steps of the whole run.")
    context: Count = Field(description="Most tokens of one sequence.")
    token_budget: Count = Field(description="Most padded tokens of one rank in one microbatch.")
    global_batch_tokens: Count = Field(description="Tokens of one step, whatever the pool.")
    planner: str = Field(default="hydra", description="static, hydra, hydra-opt or mcore-v2.")
    max_degree: Count | None = Field(
        default=None, description="Largest CP degree; absent: the planner's."
    )
    cp_comm: Split = Field(
        default="auto", description="Ulysses x ring: auto, ulysses, ring or [u, r]."
    )
    dtype: Literal["float64", "float32", "bfloat16"] = Field(
        default="float32", description="Of weights and activations; bfloat16 keeps float32 masters."
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="Activations computed again in backward to save memory."
    )
    overlap_all_to_all: bool = Field(
        default=True, description="Launch all-to-alls as soon as their tensor is final."
    )
    trace: bool = Field(default=False, description="Write a Perfetto trace into the run directory.")
    workers: Count = Field(description="Worker processes to start with: ranks x TP x PP.")
    cpus_per_worker: NotNegative = Field(
        default=1.0, description="CPU cores a worker claims; below 1, workers share cores."
    )
    gpus_per_worker: NotNegative = Field(
        default=0.0, description="GPUs a worker claims, whole ones; 0: it trains on CPU cores."
    )
    data: DataSection
    model: ModelSection
    optimizer: OptimizerSection = OptimizerSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    cost: CostSection = CostSection()

    @model_validator(mode="after")
    def _pool_is_whole(self) -> Self:
        sizes = {
            "workers": self.workers,
            "elastic.min": self.elastic.min,
            "elastic.max": self.elastic.max,
        }
        for key, size in sizes.items():
            if size is not None:
                _require_whole_units(key, size, self.parallel.scale_unit)
        low, high = self.elastic.min or 1, self.elastic.max or self.workers
        if not low <= self.workers <= high:
            raise ValueError(
                f"workers ({self.workers}) must be within elastic.min..max ({low}..{high})"
            )
        return self

    @field_validator("gpus_per_worker")
    @classmethod
    def _gpus_are_whole(cls, gpus: float) -> float:
        """Two ranks on one GPU cannot meet in a collective of NCCL."""
        if not gpus.is_integer():
            raise ValueError(f"must be 0 or a whole number >= 1, got {gpus:g}")
        return gpus

    @model_validator(mode="after")
    def _shards_survive(self) -> Self:
        """docs/adr/0010: a lost worker takes its shard of the optimizer state with it."""
        if self.optimizer.distributed_optimizer and self.elastic.max_failures:
            raise ValueError(
                f"elastic.max_failures ({self.elastic.max_failures}) must be 0 with "
                "optimizer.distributed_optimizer: the optimizer shard of a lost worker has no "
                "copy. With 0 a loss ends the run, and --resume goes on from the last checkpoint"
            )
        return self

    @model_validator(mode="after")
    def _axes_fit_the_model(self) -> Self:
        axes, model = self.parallel, self.model
        if axes.expert > 1 and (not model.num_experts or model.num_experts % axes.expert):
            raise ValueError(
                f"parallel.expert ({axes.expert}) must divide model.num_experts "
                f"({model.num_experts})"
            )
        if model.num_heads % axes.tensor:
            raise ValueError(
                f"parallel.tensor ({axes.tensor}) must divide model.num_heads ({model.num_heads})"
            )
        layers = axes.pipeline * axes.chunks
        if model.num_layers % layers:
            raise ValueError(
                f"parallel.pipeline x chunks ({layers}) must divide model.num_layers "
                f"({model.num_layers})"
            )
        return self

    @property
    def corpus_path(self) -> str:
        """The corpus; without `data.corpus`, a file under storage_path named by what makes it."""
        if self.data.corpus is not None:
            return self.data.corpus
        key = json.dumps([self.data.model_dump(), self.context]).encode()
        digest = hashlib.blake2b(key, digest_size=6).hexdigest()
        named = PurePath(self.data.sources[0]).stem
        return str(PurePath(self.storage_path) / "corpora" / f"{named}-{digest}.parquet")

    def num_ranks(self, num_workers: int) -> int:
        """G: the HDP ranks that `num_workers` processes make.

        Raises:
            InputError: the processes do not fill whole scale units.
        """
        unit = self.parallel.scale_unit
        if num_workers < 1 or num_workers % unit:
            below = max(unit, num_workers // unit * unit)
            raise InputError(
                "the number of workers must fill whole scale units (tensor x pipeline x expert)",
                value=num_workers,
                limit=f"a multiple of {unit}",
                remedy=f"Use {below} or {below + unit}.",
            )
        return num_workers // self.parallel.processes_per_rank

    def pool_shape(self, num_ranks: int) -> PoolShape:
        """The pool of `num_ranks` HDP ranks as the planner sees it.

        Its largest degree is one that `cp_comm` can split, as is every smaller one: a pool may
        shrink to any size, and a run must not end because Ulysses cannot cut 8 heads by 3.
        """
        axes = self.parallel
        pool = PoolShape(
            num_ranks=num_ranks,
            token_budget=self.token_budget,
            stages=axes.pipeline,
            chunks=axes.chunks,
            expert_ranks=axes.expert,
            max_degree=self.max_degree,
            pad_unit=2 * axes.tensor if axes.sequence_parallel else 2,
        )
        attention = attention_shape(self.model, self.dtype)
        largest = largest_degree(pool.degrees, attention, cp_comm=self.cp_comm, tensor=axes.tensor)
        return pool if largest == pool.degrees[-1] else replace(pool, max_degree=largest)

    def model_spec(self, vocab_size: int) -> ModelSpec:
        """The model for a corpus of `vocab_size` tokens.

        Tensor ranks hold equal parts of the vocabulary, so it is padded to a multiple of them.
        """
        padded = -(-vocab_size // self.parallel.tensor) * self.parallel.tensor
        return ModelSpec(vocab_size=padded, context=self.context, **self.model.model_dump())

    def cost_model(self) -> CostModel:
        """What the planner is told a sequence costs."""
        return cost_model(
            self.cost, self.model, self.parallel, dtype=self.dtype, cp_comm=self.cp_comm
        )

    def training_spec(self) -> TrainingSpec:
        """How every worker trains."""
        optimizer = self.optimizer.model_dump()
        return TrainingSpec(
            seed=self.seed,
            dtype=self.dtype,
            optimizer=optimizer.pop("name"),
            recompute=self.recompute,
            overlap_all_to_all=self.overlap_all_to_all,
            trace=self.trace,
            **optimizer,
            **self.parallel.model_dump(),
        )
