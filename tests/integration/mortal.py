"""Real workers that die where a test says: in the middle of a forward, a collective, a checkpoint.

A test leaves an order in a folder: a file named after the phase, with the rank that is to die.
The worker of that rank takes the order when it comes to the phase, and kills its own process.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from workers.actor import RuntimeFactory
from workers.attention import ring
from workers.protocol import Membership, ModelSpec, StepCommand, StepPayload, StepResult
from workers.protocol import TrainingSpec as Training
from workers.runtime import WorkerRuntime

PHASES = ("planning", "forward", "collective", "backward", "optimizer", "checkpoint")


class MortalRuntime(WorkerRuntime):
    """The real runtime. Each step takes `pace_s` longer, without work: others can load."""

    def __init__(self, model: ModelSpec, training: Training, orders: Path, pace_s: float) -> None:
        super().__init__(model, training)
        self._orders, self._pace_s = orders, pace_s

    def load(self) -> dict[str, object]:
        """Load, and put a trap into each phase."""
        facts = super().load()
        for module, name, phase in (
            (ring, "_forward", "forward"),
            (ring, "_backward", "backward"),
            (dist, "all_reduce", "collective"),
        ):
            setattr(module, name, self._trapped(getattr(module, name), phase))
        return facts

    def run_step(self, command: StepCommand, payload: StepPayload) -> StepResult:
        """Train a step; while the worker is idle before it, the driver plans."""
        time.sleep(self._pace_s)
        self._die_if_ordered("planning")
        return super().run_step(command, payload)

    def start_save(self, folder: str) -> None:
        """Dies while the share is being written."""
        super().start_save(folder)
        self._die_if_ordered("checkpoint")

    def _forget_state(self) -> None:
        super()._forget_state()
        self._die_if_ordered("optimizer")

    def _trapped(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def trapped(*args: Any, **kwargs: Any) -> Any:
            if phase == "collective" and self._is_ordered(phase):
                function(*args, **kwargs | {"async_op": True})  # this rank's part is under way
            self._die_if_ordered(phase)
            return function(*args, **kwargs)

        return trapped

    def _is_ordered(self, phase: str) -> bool:
        membership: Membership | None = self._membership
        if membership is None:
            return False
        with suppress(FileNotFoundError):
            rank = int((self._orders / phase).read_text())
            return rank % membership.world_size == membership.rank
        return False

    def _die_if_ordered(self, phase: str) -> None:
        if self._is_ordered(phase):
            (self._orders / phase).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def mortal_runtime(orders: Path, pace_s: float = 0.0) -> RuntimeFactory:
    """A factory of workers that take orders from a folder."""
    return partial(_make, orders=orders, pace_s=pace_s)


def _make(model: ModelSpec, training: Training, orders: Path, pace_s: float) -> MortalRuntime:
    return MortalRuntime(model, training, orders, pace_s)


def order(orders: Path, phase: str, rank: int) -> None:
    """Let the worker of a rank (of the pool's size then) die when it next comes to `phase`."""
    written = orders / f".{phase}"
    written.write_text(str(rank))
    written.rename(orders / phase)
