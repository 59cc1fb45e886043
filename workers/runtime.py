"""One worker process, from loading to training to re-forming: all of it but Ray.

A worker is in at most one generation. Leaving keeps weights and optimizer moments; joining takes
them up again in another place or pool. A step is exactly-once: a worker refuses what it has
applied, and what is for another generation or another plan, before its first collective.
"""

import os
import resource
import time
import traceback
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from planner.errors import InputError
from planner.pool import PoolShape
from workers import checkpoint, cpu_shim
from workers.errors import (
    DigestMismatchError,
    GenerationError,
    NotJoinedError,
    StaleCommandError,
    StateError,
    StepFailedError,
)
from workers.groups import GroupRegistry
from workers.megatron import patches
from workers.megatron.config import check
from workers.megatron.initialise import initialise
from workers.megatron.model import build_chunks
from workers.megatron.naming import NamedParameter, canonical_parameters
from workers.megatron.optimizer import PoolOptimizer, learning_rate, wrap_in_ddp
from workers.microbatch import LocalBatch, local_batches
from workers.phases import StepClock, chrome_trace
from workers.protocol import (
    Membership,
    ModelSpec,
    ShardInfo,
    StepCommand,
    StepPayload,
    StepResult,
    TrainingSpec,
)
from workers.sockets import Connections
from workers.state import TrainState, adopt, capture, digest, needed, owned_keys
from workers.step import (
    agree,
    forward_backward,
    labelled_tokens,
    microbatch_stats,
    nonfinite_sequences,
)
from workers.transfer import furthest_state

_SAVE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class _Standing:
    """Everything that belongs to one generation, and goes with it."""

    membership: Membership
    registry: GroupRegistry
    modules: list[DistributedDataParallel]
    parameters: list[NamedParameter]
    optimizer: PoolOptimizer


class WorkerRuntime:
    """One worker: model, optimizer and place in the pool.

    Args:
        model: the model to build, the same on every worker.
        training: how to train it.

    Raises:
        InputError: the two do not go together.
    """

    def __init__(self, model: ModelSpec, training: TrainingSpec) -> None:
        check(model, training)
        self._model = model
        self._training = training
        self._standing: _Standing | None = None
        self._state = TrainState(step=0, tensors={})
        self._writer = checkpoint.ShardWriter()
        self._connections: Connections | None = None

    def load(self) -> dict[str, object]:
        """Prepare all that needs no generation; returns facts of this process. Idempotent."""
        is_shimmed = cpu_shim.install()
        patches.apply()
        return {
            "torch": torch.__version__,
            "megatron_core": version("megatron-core"),
            "device": str(_device()),
            "cpu_shim": is_shimmed,
            "pid": os.getpid(),
        }

    def join(self, membership: Membership, pool: PoolShape) -> int:
        """Enter a generation with the state this process kept, or with seeded weights.

        A collective of all workers of the generation.

        Args:
            membership: the place to take.
            pool: the pool of the generation.

        Returns:
            The last step this process's state has; 0 if it has none, or not what its new place
            needs: then it must take a peer's with `sync_state`.

        Raises:
            GenerationError: this worker is already in a generation.
            InputError: the sizes do not go together.
        """
        if self._standing is not None:
            raise GenerationError(
                "this worker is already in a generation",
                value=self._standing.membership.generation,
                remedy="Leave it first.",
            )
        self._connections = Connections()
        registry = GroupRegistry(membership, pool, self._training)
        try:
            self._standing = self._build(membership, registry)
            dist.barrier()  # a worker that left early would break groups others still connect
        except BaseException:
            self._standing = None
            registry.close()
            raise
        self._connections.seal()
        return self._state.step if self._takes_up_state() else 0

    def _build(self, membership: Membership, registry: GroupRegistry) -> _Standing:
        chunks = build_chunks(self._model, self._training)
        parameters = canonical_parameters(chunks)
        if not self._state.tensors:
            initialise(parameters, seed=self._training.seed, num_layers=self._model.num_layers)
        modules = wrap_in_ddp(chunks, self._training)
        optimizer = PoolOptimizer(modules, parameters, self._training)
        return _Standing(membership, registry, modules, parameters, optimizer)

    def _takes_up_state(self) -> bool:
        """Continue from the kept state if it has all that this place needs."""
        here = self._here()
        if not needed(here.parameters, here.optimizer).keys() <= self._state.tensors.keys():
            return False
        self._adopt(self._state)
        return True

    def _adopt(self, state: TrainState) -> None:
        """From now on the live weights are the state; the copy in `state` is let go."""
        here = self._here()
        adopt(state, here.parameters, here.optimizer)
        self._state = TrainState(step=state.step, tensors={})

    def leave(self) -> None:
        """Leave the generation, keeping the state; does nothing outside of one.

        Works after a failure too, except that a sharded optimizer then cannot be gathered: its
        state is lost and the run goes on from a checkpoint.
        """
        if self._standing is None:
            return
        if self._state.step == 0:
            self._state = TrainState(step=0, tensors={})  # the seed gives these weights again
        else:
            self._state = self._capture_if_possible()
        registry, self._standing = self._standing.registry, None
        self._connections = None
        registry.close()

    def _capture_if_possible(self) -> TrainState:
        try:
            return self._capture()
        except RuntimeError:
            return TrainState(step=0, tensors={})

    def _capture(self) -> TrainState:
        """The state of this process: the live one, or what an unfit place made it keep."""
        if self._state.tensors:
            return self._state
        here = self._here()
        return capture(here.parameters, here.optimizer, self._state.step)

    def abort(self) -> None:
        """Free a thread that is stuck in a collective; called from another thread.

        The stuck call raises, and the worker must leave the generation.
        """
        if torch.cuda.is_available() and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch's only way for all
        elif self._connections is not None:
            self._connections.shut_down()

    def sync_state(self, source_rank: int) -> int:
        """Take the state of the step that `source_rank` has. A collective.

        Returns:
            The step every worker now has.

        Raises:
            StateError: no worker holds a part of that state.
        """
        here = self._here()
        state = furthest_state(
            self._capture(), needed(here.parameters, here.optimizer), source_rank, _device()
        )
        self._adopt(state)
        return state.step

    def run_step(self, command: StepCommand, payload: StepPayload) -> StepResult:
        """Train one step, on all workers of the generation or on none.

        Raises:
            NotJoinedError, GenerationError, StaleCommandError, DigestMismatchError: the command
                is not for this worker now; raised before the first collective.
            StepFailedError: the step broke off before this worker applied it.
        """
        self._accept(command, payload)
        try:
            return self._run(command, payload)
        except RuntimeError as error:
            text = "".join(traceback.format_exception(error)[-3:])
            # The frames of the traceback refer to process groups, and a dead group that is
            # referred to keeps its sockets open and its other members waiting.
            traceback.clear_frames(error.__traceback__)
        # Other operations may still be in flight, and peers may wait for them: free everyone now.
        self.abort()
        raise StepFailedError("the step broke off", value=text, remedy="Form a new generation.")

    def _accept(self, command: StepCommand, payload: StepPayload) -> None:
        here = self._here()
        if command.generation != here.membership.generation:
            raise GenerationError(
                "the step is for another generation",
                value=command.generation,
                limit=here.membership.generation,
            )
        if command.step != self._state.step + 1:
            raise StaleCommandError(
                "the step is not the next one", value=command.step, limit=self._state.step + 1
            )
        if payload.plan.digest() != command.plan_digest:
            raise DigestMismatchError(
                "the plan is not the one that was announced",
                value=payload.plan.digest(),
                limit=command.plan_digest,
                remedy="Send the step again.",
            )
        if payload.plan.pool.num_ranks != here.membership.num_ranks:
            raise GenerationError(
                "the plan is for a pool of another size",
                value=payload.plan.pool.num_ranks,
                limit=here.membership.num_ranks,
            )
        if payload.plan.num_microbatches < 1:
            raise InputError("the plan has no microbatch", value=0, limit=">= 1")

    def _run(self, command: StepCommand, payload: StepPayload) -> StepResult:
        start = time.perf_counter()
        here = self._here()
        batches = local_batches(payload, here.registry, _device(), keep_events=self._training.trace)
        clock = StepClock(len(batches))
        here.optimizer.forget_gradients()
        losses = forward_backward(here.modules, batches, clock)
        grad_norm = here.optimizer.prepare()
        verdict = agree(losses, grad_norm, here.registry, _device())
        if verdict.token_count != labelled_tokens(payload):
            raise StateError(
                "tokens were counted more than once, or not at all",
                value=verdict.token_count,
                limit=labelled_tokens(payload),
            )
        lr = learning_rate(command.step, self._training)
        if verdict.is_finite:
            with clock.phase("update weights"):
                here.optimizer.apply(lr, grad_norm)
            self._state = TrainState(step=command.step, tensors={})
        return StepResult(
            step=command.step,
            generation=command.generation,
            rank=here.membership.rank,
            applied=verdict.is_finite,
            loss_sum=verdict.loss_sum,
            token_count=verdict.token_count,
            grad_norm=grad_norm,
            lr=lr,
            step_s=time.perf_counter() - start,
            peak_bytes=_peak_bytes(),
            nonfinite_sequences=nonfinite_sequences(losses),
            microbatches=microbatch_stats(batches, clock),
            trace_events=self._trace(clock, batches) if self._training.trace else (),
        )

    def _trace(self, clock: StepClock, batches: list[LocalBatch]) -> tuple[dict[str, Any], ...]:
        events = (event for batch in batches for event in batch.microbatch.counters.events)
        return chrome_trace(self._here().membership.rank, clock.phases, events)

    def save_shard(self, folder: str) -> tuple[ShardInfo, ...]:
        """Write this process's share of a checkpoint; () if it has none to write.

        A collective only if the optimizer is sharded.
        """
        self.start_save(folder)
        return self.finish_save()

    def start_save(self, folder: str) -> None:
        """Copy this process's share to host memory; a thread writes it while training goes on."""
        here = self._here()
        self._writer.start(
            self._capture(),
            owned_keys(here.parameters, here.optimizer),
            folder,
            here.membership.rank,
        )

    def finish_save(self) -> tuple[ShardInfo, ...]:
        """Wait for the share that `start_save` began; its files."""
        return self._writer.finish(_SAVE_TIMEOUT_S)

    def load_shard(self, folder: str, shards: tuple[ShardInfo, ...] = ()) -> int:
        """Take this process's part of a checkpoint's state.

        Args:
            folder: the checkpoint, as written by `save_shard` of any pool.
            shards: files to verify first, by size and checksum.

        Returns:
            The checkpoint's step.

        Raises:
            CheckpointError: a shard is missing, damaged, or made for another model.
        """
        here = self._here()
        checkpoint.verify(folder, shards)
        state = checkpoint.read(folder, needed(here.parameters, here.optimizer))
        self._adopt(state)
        return state.step

    def fingerprint(self) -> dict[str, object]:
        """The applied step and a digest of this process's weights."""
        state = self._capture() if self._standing else self._state
        return {"step": state.step, "weights": digest(state)}

    def _here(self) -> _Standing:
        if self._standing is None:
            raise NotJoinedError("this worker is in no generation", remedy="Join one first.")
        return self._standing


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _peak_bytes() -> int:
    """Most memory used so far: the device's, or this process's where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
