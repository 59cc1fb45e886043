"""The Ray actor of one worker process: a thin shell that gives WorkerRuntime its threads.

Training calls run one after the other on the default thread; `heartbeat`, `abort` and
`finish_save` have threads of their own, so that they answer while a step runs or hangs in a
collective.
"""

import os
import time
from functools import partial
from typing import Any, Protocol

import ray

from planner.pool import PoolShape
from workers.protocol import (
    Membership,
    ModelSpec,
    ShardInfo,
    StepCommand,
    StepPayload,
    StepResult,
    TrainingSpec,
)


class Runtime(Protocol):
    """What the actor needs of workers.runtime.WorkerRuntime; driver tests bring their own."""

    def load(self) -> dict[str, object]:
        """Import the heavy libraries and return facts of the process."""

    def join(self, membership: Membership, pool: PoolShape) -> int:
        """Enter a generation; returns the last applied step."""

    def leave(self) -> None:
        """Drop the generation's groups and keep the state."""

    def abort(self) -> None:
        """Unblock a stuck collective, from another thread."""

    def sync_state(self) -> int:
        """Collective: take the furthest whole state; returns its step, 0 if there is none."""

    def run_step(self, command: StepCommand, payload: StepPayload) -> StepResult:
        """Train one step."""

    def start_save(self, folder: str) -> None:
        """Copy this rank's share of a checkpoint, and write it in the background."""

    def finish_save(self) -> tuple[ShardInfo, ...]:
        """Wait for the share in writing; from another thread."""

    def verify_shards(self, folder: str, shards: tuple[ShardInfo, ...]) -> None:
        """Check some files of a checkpoint."""

    def load_shards(self, folder: str, names: tuple[str, ...]) -> int:
        """Take a checkpoint's state; returns its step."""

    def fingerprint(self) -> dict[str, Any]:
        """The applied step and a digest of the weights."""


class RuntimeFactory(Protocol):
    """Makes the runtime inside the worker process; must pickle."""

    def __call__(self, model: ModelSpec, training: TrainingSpec) -> Runtime:
        """Make the runtime."""


def megatron_runtime(model: ModelSpec, training: TrainingSpec) -> Runtime:
    """The real runtime; imported here so that no other process pays for it."""
    from workers.runtime import WorkerRuntime  # noqa: PLC0415  (heavy, worker processes only)

    return WorkerRuntime(model, training)


class HydraWorker:
    """One worker process.

    Args:
        run: the name of the run.
        worker_id: never used twice in a run.
        model: the model to build.
        training: how to train it.
        make_runtime: what builds the runtime.
    """

    def __init__(
        self,
        run: str,
        worker_id: int,
        model: ModelSpec,
        training: TrainingSpec,
        make_runtime: RuntimeFactory = megatron_runtime,
    ) -> None:
        self._run, self._worker_id = run, worker_id
        self._make_runtime = partial(make_runtime, model, training)
        self._runtime: Runtime
        self._busy_with, self._since = "starting", time.time()

    def __repr__(self) -> str:
        return f"HydraWorker({self._run}, worker {self._worker_id})"

    def load(self) -> dict[str, object]:
        """Import and prepare all that needs no generation; returns facts, pid and node."""
        self._note("load")
        self._runtime = self._make_runtime()
        facts = dict(self._runtime.load())
        node_id = ray.get_runtime_context().get_node_id()
        return self._done({**facts, "pid": os.getpid(), "node_id": node_id})

    def join(self, membership: Membership, pool: PoolShape) -> int:
        """Leave the generation before, if any, and enter this one.

        Returns:
            The last step this process applied.
        """
        self._note("join")
        self._runtime.leave()
        return self._done(self._runtime.join(membership, pool))

    def leave(self) -> None:
        """Leave the generation; the state stays."""
        self._note("leave")
        self._runtime.leave()
        self._note("idle")

    def sync_state(self) -> int:
        """Take the furthest whole state of the generation; returns its step, 0 without one."""
        self._note("sync_state")
        return self._done(self._runtime.sync_state())

    def run_step(self, command: StepCommand, payload: list[Any]) -> StepResult:
        """Train one step. `payload` is the object reference in a list, so that it comes by view."""
        self._note(f"step {command.step}")
        return self._done(self._runtime.run_step(command, ray.get(payload[0], timeout=60)))

    def start_save(self, folder: str) -> None:
        """Copy this rank's share of a checkpoint; it is written while training goes on."""
        self._note("start_save")
        self._runtime.start_save(folder)
        self._note("idle")

    @ray.method(concurrency_group="save")
    def finish_save(self) -> tuple[ShardInfo, ...]:
        """Wait for the share in writing; its files."""
        return self._runtime.finish_save()

    def verify_shards(self, folder: str, shards: tuple[ShardInfo, ...]) -> None:
        """Check some files of a checkpoint by size and checksum."""
        self._note("verify_shards")
        self._runtime.verify_shards(folder, shards)
        self._note("idle")

    def load_shards(self, folder: str, names: tuple[str, ...]) -> int:
        """Take a checkpoint's state from the shards of these names; returns its step."""
        self._note("load_shards")
        return self._done(self._runtime.load_shards(folder, names))

    def fingerprint(self) -> dict[str, Any]:
        """The applied step and a digest of the weights."""
        return self._runtime.fingerprint()

    @ray.method(concurrency_group="control")
    def heartbeat(self) -> dict[str, Any]:
        """Answer at once: what this worker is at, and for how long."""
        busy_s = time.time() - self._since
        return {"worker_id": self._worker_id, "busy_with": self._busy_with, "busy_s": busy_s}

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Unblock a collective that a dead peer left hanging."""
        self._runtime.abort()

    def _note(self, busy_with: str) -> None:
        self._busy_with, self._since = busy_with, time.time()

    def _done(self, result: Any) -> Any:
        self._note("idle")
        return result


WorkerActor: Any = ray.remote(
    max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2, "save": 1}
)(HydraWorker)
