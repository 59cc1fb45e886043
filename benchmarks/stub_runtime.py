"""A worker that computes nothing, for measuring what the driver itself costs a step."""
# ruff: noqa: ARG001, ARG002  it takes what the real one takes

from typing import Any

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


class StubRuntime:
    """Says yes to everything at once."""

    def __init__(self) -> None:
        self._applied, self._rank = 0, 0

    def load(self) -> dict[str, object]:
        """Nothing to load."""
        return {}

    def join(self, membership: Membership, pool: PoolShape) -> int:
        """Take the place."""
        self._rank = membership.rank
        return self._applied

    def leave(self) -> None:
        """Nothing to leave."""

    def abort(self) -> None:
        """Nothing to free."""

    def sync_state(self) -> int:
        """Nothing to copy."""
        return self._applied

    def run_step(self, command: StepCommand, payload: StepPayload) -> StepResult:
        """Apply at once."""
        self._applied = command.step
        return StepResult(
            step=command.step,
            generation=command.generation,
            rank=self._rank,
            applied=True,
            loss_sum=1.0,
            token_count=int(payload.plan.lengths.sum()),
            grad_norm=1.0,
            lr=0.0,
            step_s=0.0,
            peak_bytes=0,
        )

    def start_save(self, folder: str) -> None:
        """Nothing to save."""

    def finish_save(self) -> tuple[ShardInfo, ...]:
        """Nothing was saved."""
        return ()

    def verify_shards(self, folder: str, shards: tuple[ShardInfo, ...]) -> None:
        """Nothing to check."""

    def load_shards(self, folder: str, names: tuple[str, ...]) -> int:
        """Nothing to read."""
        return self._applied

    def fingerprint(self) -> dict[str, Any]:
        """The applied step."""
        return {"step": self._applied}


def stub_runtime(model: ModelSpec, training: TrainingSpec) -> StubRuntime:
    """Makes the stub in the worker process."""
    return StubRuntime()
