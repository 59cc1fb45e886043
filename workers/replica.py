"""This process's part of the model in one generation: built from its place, gone with it.

It trains a step up to the point of return, and turns its weights and moments into train state
and back. What it may be told, and what outlives it, is the runtime's business.
"""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from workers.errors import StateError
from workers.groups import GroupRegistry
from workers.megatron.initialise import initialise
from workers.megatron.model import build_chunks
from workers.megatron.naming import NamedParameter, canonical_parameters
from workers.megatron.optimizer import PoolOptimizer, learning_rate, wrap_in_ddp
from workers.microbatch import LocalBatch, local_batches
from workers.phases import StepClock, chrome_trace
from workers.protocol import ModelSpec, StepCommand, StepPayload, StepResult, TrainingSpec
from workers.state import TrainState, adopt, capture, needed, owned_keys
from workers.step import (
    agree,
    forward_backward,
    labelled_tokens,
    microbatch_stats,
    nonfinite_sequences,
)


def training_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Model chunks in DDP, their optimizer, and where their parameters are.

    Args:
        registry: the generation's groups, and this process's place.
        training: how it trains.
        modules: DDP-wrapped chunks, in virtual-pipeline order.
        parameters: their parameters by canonical name.
        optimizer: over all of them.
        device: where they are.
    """

    registry: GroupRegistry
    training: TrainingSpec
    modules: list[DistributedDataParallel]
    parameters: list[NamedParameter]
    optimizer: PoolOptimizer
    device: torch.device = field(default_factory=training_device)

    @classmethod
    def build(
        cls,
        model: ModelSpec,
        training: TrainingSpec,
        registry: GroupRegistry,
        *,
        fill_from_seed: bool,
    ) -> "Replica":
        """Build this process's part; its weights come from the seed, or are left to `adopt`."""
        chunks = build_chunks(model, training)
        parameters = canonical_parameters(chunks)
        if fill_from_seed:
            initialise(parameters, seed=training.seed, num_layers=model.num_layers)
        modules = wrap_in_ddp(chunks, training)
        optimizer = PoolOptimizer(modules, parameters, training)
        return cls(registry, training, modules, parameters, optimizer)

    def train(
        self,
        command: StepCommand,
        payload: StepPayload,
        rank: int,
        before_apply: Callable[[], None],
    ) -> StepResult:
        """Train one step, on all processes or on none.

        Args:
            command: which step.
            payload: its batch and plan.
            rank: this process's, for the result.
            before_apply: called before weights change; what is raised later leaves them between
                two steps.

        Raises:
            StateError: the pool's count of tokens is not the batch's; nothing was applied.
            RuntimeError: a collective or the optimizer broke off.
        """
        start_s = time.perf_counter()
        batches = local_batches(
            payload, self.registry, self.device, keep_events=self.training.trace
        )
        clock = StepClock(len(batches))
        self.optimizer.forget_gradients()
        losses = forward_backward(self.modules, batches, clock)
        grad_norm = self.optimizer.prepare()
        verdict = agree(losses, grad_norm, self.registry, self.device)
        _check_count(verdict.token_count, labelled_tokens(payload))
        lr = learning_rate(command.step, self.training)
        if verdict.is_finite:
            before_apply()
            with clock.phase("update weights"):
                self.optimizer.apply(lr, grad_norm)
        return StepResult(
            step=command.step,
            generation=command.generation,
            rank=rank,
            applied=verdict.is_finite,
            loss_sum=verdict.loss_sum,
            token_count=verdict.token_count,
            grad_norm=grad_norm,
            lr=lr,
            step_s=time.perf_counter() - start_s,
            peak_bytes=_peak_bytes(),
            nonfinite_sequences=nonfinite_sequences(losses),
            microbatches=microbatch_stats(batches, clock),
            trace_events=_trace(rank, clock, batches) if self.training.trace else (),
        )

    def needed(self) -> dict[str, torch.Tensor]:
        """See `state.needed`."""
        return needed(self.parameters, self.optimizer)

    def owned_keys(self) -> Iterator[str]:
        """See `state.owned_keys`."""
        return owned_keys(self.parameters, self.optimizer)

    def capture(self, step: int) -> TrainState:
        """See `state.capture`."""
        return capture(self.parameters, self.optimizer, step)

    def adopt(self, state: TrainState) -> None:
        """See `state.adopt`."""
        adopt(state, self.parameters, self.optimizer)


def _check_count(counted: int, expected: int) -> None:
    if counted != expected:
        raise StateError(
            "tokens were counted more than once, or not at all", value=counted, limit=expected
        )


def _peak_bytes() -> int:
    """Most memory used so far: the device's, or this process's where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _trace(rank: int, clock: StepClock, batches: list[LocalBatch]) -> tuple[dict[str, Any], ...]:
    events = (event for batch in batches for event in batch.microbatch.counters.events)
    return chrome_trace(rank, clock.phases, events)
