"""Writing and reading a checkpoint with the workers of a standing generation."""

from collections.abc import Sequence

from hydra_ray.driver.checkpoints import Checkpoints, Manifest
from hydra_ray.driver.crew import Crew
from hydra_ray.driver.errors import CheckpointError
from hydra_ray.driver.generation import WorkersLostError
from hydra_ray.driver.journal import Journal
from planner.errors import HydraError
from workers.protocol import ShardInfo


def write_shards(
    crew: Crew, workers: Sequence[int], folder: str, *, timeout_s: float
) -> tuple[ShardInfo, ...]:
    """Have every worker write its share into `folder`.

    Raises:
        WorkersLostError: a worker was lost; the folder holds no checkpoint.
    """
    answers = crew.call(workers, "save_shard", lambda _: (folder,), timeout_s=timeout_s)
    if not answers.complete:
        raise WorkersLostError(answers.lost)
    return tuple(shard for shards in answers.results.values() for shard in shards)


def restore_newest(
    checkpoints: Checkpoints,
    crew: Crew,
    workers: Sequence[int],
    journal: Journal,
    *,
    timeout_s: float,
) -> Manifest | None:
    """Give all workers the newest checkpoint that can be read; None if there never was one.

    A damaged one is told as an event, and the one before it is taken.

    Raises:
        CheckpointError: there are checkpoints, and none can be read.
        WorkersLostError: a worker was lost.
    """
    steps = checkpoints.steps()
    for step in reversed(steps):
        try:
            manifest = checkpoints.read(step)
            _load(crew, workers, checkpoints.folder(step), timeout_s)
        except HydraError as error:
            journal.event("checkpoint_damaged", step=step, error=str(error))
            continue
        return manifest
    if steps:
        raise CheckpointError(
            "no checkpoint of the run can be read",
            value=[checkpoints.folder(step) for step in steps],
            remedy="See events.jsonl for what is wrong with each.",
        )
    return None


def _load(crew: Crew, workers: Sequence[int], folder: str, timeout_s: float) -> None:
    answers = crew.call(workers, "load_shard", lambda _: (folder,), timeout_s=timeout_s)
    if not answers.complete:
        raise WorkersLostError(answers.lost)
