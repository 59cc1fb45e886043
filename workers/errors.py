"""What a worker refuses, and why: every error a worker raises on purpose."""

from planner.errors import HydraError


class WorkerError(HydraError):
    """A worker cannot do what it was told; its weights are as they were."""


class NotJoinedError(WorkerError):
    """The command needs a generation, and this worker is in none."""


class StaleCommandError(WorkerError):
    """The step was already applied here, or it is not the next one."""


class GenerationError(WorkerError):
    """The command is for another generation of the pool."""


class DigestMismatchError(WorkerError):
    """The plan that arrived is not the plan the driver announced."""


class StepFailedError(WorkerError):
    """A step broke off, most often because a peer was lost; it was not applied here as a whole."""


class StateError(WorkerError):
    """Train state is missing, incomplete, or of another shape than the model."""


class CheckpointError(WorkerError):
    """A checkpoint shard cannot be written, is missing, damaged, or of another layout."""


class CheckpointMismatchError(CheckpointError):
    """A whole checkpoint, but of another model or tensor-parallel size: no older one will do."""
