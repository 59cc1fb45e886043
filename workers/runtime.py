"""One worker process, from loading to training to re-forming: all of it but Ray.

A worker is in at most one generation. Leaving keeps weights and optimizer moments; joining takes
them up again in another place or pool. A step is exactly-once: a worker refuses what it has
applied, and what is for another generation or another plan, before its first collective.
"""

import gc
import os
import traceback
from importlib.metadata import version

import torch
import torch.distributed as dist

from planner.errors import InputError
from planner.pool import PoolShape
from workers import checkpoint, cpu_shim
from workers.errors import (
    DigestMismatchError,
    GenerationError,
    NotJoinedError,
    StaleCommandError,
    StepFailedError,
)
from workers.groups import GroupRegistry
from workers.megatron import patches
from workers.megatron.config import check
from workers.protocol import (
    Membership,
    ModelSpec,
    ShardInfo,
    StepCommand,
    StepPayload,
    StepResult,
    TrainingSpec,
)
from workers.replica import Replica, training_device
from workers.sockets import Connections
from workers.state import NO_STATE, TrainState, digest
from workers.transfer import furthest_state

_SAVE_TIMEOUT_S = 600.0


class WorkerRuntime:
    """One worker: its state, and its place in the pool while it has one.

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
        self._membership: Membership | None = None
        self._replica: Replica | None = None
        self._connections: Connections | None = None
        # While a replica is live its tensors are the state, and only the step is kept here; where
        # the optimizer is sharded, all of it until the first step: a newcomer has to be given it.
        self._state = NO_STATE
        self._writer = checkpoint.ShardWriter()

    def load(self) -> dict[str, object]:
        """Prepare all that needs no generation; returns facts of this process. Idempotent."""
        is_shimmed = cpu_shim.install()
        patches.apply()
        # Leaving a generation collects garbage, which looks at every object: half a second, unless
        # what was imported, which is none, is set aside.
        gc.collect()
        gc.freeze()
        return {
            "torch": torch.__version__,
            "megatron_core": version("megatron-core"),
            "device": str(training_device()),
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
        if self._membership is not None:
            raise GenerationError(
                "this worker is already in a generation",
                value=self._membership.generation,
                remedy="Leave it first.",
            )
        self._connections = Connections()
        try:
            replica = self._form(membership, pool)
        except BaseException:
            self._connections = None
            raise
        self._connections.seal()
        self._membership, self._replica = membership, replica
        if not replica.needed().keys() <= self._state.tensors.keys():
            return 0
        replica.adopt(self._state)
        if not replica.optimizer.is_sharded:
            self._state = TrainState(step=self._state.step, tensors={})
        return self._state.step

    def _form(self, membership: Membership, pool: PoolShape) -> Replica:
        registry = GroupRegistry(membership, pool, self._training)
        try:
            replica = Replica.build(
                self._model, self._training, registry, fill_from_seed=not self._state.tensors
            )
            dist.barrier()  # a worker that left early would break groups others still connect
        except BaseException:
            registry.close()
            raise
        return replica

    def leave(self) -> None:
        """Leave the generation, keeping the state; does nothing outside of one.

        Works after a failure too, except that a sharded optimizer then cannot be gathered: its
        state is lost, and with it the run, which `--resume` continues from its last checkpoint.
        """
        if self._replica is None:
            return
        if self._state.step == 0:
            self._state = NO_STATE  # the seed gives these weights again
        else:
            self._state = self._captured_if_possible()
        registry = self._replica.registry
        self._membership = self._replica = self._connections = None
        registry.close()

    def abort(self) -> None:
        """Free a thread that is stuck in a collective; called from another thread.

        The stuck call raises, on all workers, and they must leave the generation.
        """
        if torch.cuda.is_available() and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch's only way for all
        elif self._connections is not None:
            self._connections.shut_down()

    def sync_state(self) -> int:
        """Take the furthest state that the workers hold whole between them. A collective.

        Returns:
            The step every worker now has; 0 if they hold none whole. Then all have forgotten
            theirs, and leave and join again before they train: with seeded weights, at step 0.
        """
        replica, _ = self._here()
        state = furthest_state(self._offered(replica), replica.needed(), replica.device)
        if state.step == 0:
            self._state = NO_STATE
        else:
            self._adopt(state)
        return state.step

    def run_step(self, command: StepCommand, payload: StepPayload) -> StepResult:
        """Train one step, on all workers of the generation or on none.

        Raises:
            NotJoinedError, GenerationError, StaleCommandError, DigestMismatchError: the command
                is not for this worker now; raised before the first collective.
            StepFailedError: the step broke off: this worker has the state before it, or none if
                the optimizer had begun to change the weights.
        """
        replica, membership = self._here()
        self._check_command(command, membership)
        _check_payload(command, payload, membership)
        self._state = TrainState(step=self._state.step, tensors={})
        try:
            result = replica.train(command, payload, membership.rank, self._forget_state)
        except RuntimeError as error:
            text = "".join(traceback.format_exception(error)[-3:])
            # The frames of the traceback refer to process groups, and a dead group that is
            # referred to keeps its sockets open and its other members waiting.
            traceback.clear_frames(error.__traceback__)
            # Other operations may still be in flight, and peers wait for them: free everyone.
            self.abort()
            raise StepFailedError(
                "the step broke off", value=text, remedy="Form a new generation."
            ) from None
        if result.applied:
            self._state = TrainState(step=command.step, tensors={})
        return result

    def save_shard(self, folder: str) -> tuple[ShardInfo, ...]:
        """Write this process's share of a checkpoint; () if it has none to write.

        A collective only if the optimizer is sharded.
        """
        self.start_save(folder)
        return self.finish_save()

    def start_save(self, folder: str) -> None:
        """Copy this process's share to host memory; a thread writes it while training goes on."""
        replica, membership = self._here()
        name = checkpoint.shard_name(membership.generation, membership.rank)
        self._writer.start(self._captured(), replica.owned_keys(), f"{folder}/{name}")

    def finish_save(self) -> tuple[ShardInfo, ...]:
        """Wait for the share that `start_save` began; its files."""
        return self._writer.finish(_SAVE_TIMEOUT_S)

    def verify_shards(self, folder: str, shards: tuple[ShardInfo, ...]) -> None:
        """Check some files of a checkpoint by size and checksum, before anyone loads it.

        Raises:
            CheckpointError: one is missing or damaged.
        """
        checkpoint.verify(folder, shards)

    def load_shards(self, folder: str, names: tuple[str, ...]) -> int:
        """Take this process's part of a checkpoint's state.

        Args:
            folder: the checkpoint's folder or URL, as written by any pool.
            names: the folders of its shards in there.

        Returns:
            The checkpoint's step.

        Raises:
            CheckpointError: a shard cannot be read.
            CheckpointMismatchError: the checkpoint is of another model or layout.
        """
        replica, _ = self._here()
        self._adopt(checkpoint.read(folder, names, replica.needed()))
        return self._state.step

    def fingerprint(self) -> dict[str, object]:
        """The applied step and a digest of this process's weights."""
        state = self._state if self._replica is None else self._captured()
        return {"step": state.step, "weights": digest(state)}

    def _here(self) -> tuple[Replica, Membership]:
        if self._replica is None or self._membership is None:
            raise NotJoinedError("this worker is in no generation", remedy="Join one first.")
        return self._replica, self._membership

    def _adopt(self, state: TrainState) -> None:
        replica, _ = self._here()
        replica.adopt(state)
        self._state = TrainState(step=state.step, tensors={})

    def _forget_state(self) -> None:
        """From here to the end of the step the weights are of no step: a peer's must be taken."""
        self._state = NO_STATE

    def _offered(self, replica: Replica) -> TrainState:
        """What this process can give to others: never gathered, for newcomers hold nothing yet."""
        if self._state.tensors or self._state.step == 0 or replica.optimizer.is_sharded:
            return self._state
        return replica.capture(self._state.step)

    def _captured(self) -> TrainState:
        """The live state, or what a place that needs other parts made this process keep."""
        replica, _ = self._here()
        return self._state if self._state.tensors else replica.capture(self._state.step)

    def _captured_if_possible(self) -> TrainState:
        try:
            return self._captured()
        except RuntimeError:  # a sharded optimizer, and a peer is gone
            return NO_STATE

    def _check_command(self, command: StepCommand, membership: Membership) -> None:
        if command.generation != membership.generation:
            raise GenerationError(
                "the step is for another generation",
                value=command.generation,
                limit=membership.generation,
            )
        if command.step != self._state.step + 1:
            raise StaleCommandError(
                "the step is not the next one", value=command.step, limit=self._state.step + 1
            )


def _check_payload(command: StepCommand, payload: StepPayload, membership: Membership) -> None:
    digest_here = payload.plan.digest()
    if digest_here != command.plan_digest:
        raise DigestMismatchError(
            "the plan is not the one that was announced",
            value=digest_here,
            limit=command.plan_digest,
            remedy="Send the step again.",
        )
    if payload.plan.pool.num_ranks != membership.num_ranks:
        raise GenerationError(
            "the plan is for a pool of another size",
            value=payload.plan.pool.num_ranks,
            limit=membership.num_ranks,
        )
    if payload.plan.num_microbatches < 1:
        raise InputError("the plan has no microbatch", value=0, limit=">= 1")
