"""Writing and reading a checkpoint with the workers of a standing generation."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from hydra_ray.driver.checkpoints import Checkpoints, Manifest
from hydra_ray.driver.crew import Crew
from hydra_ray.driver.errors import CheckpointError
from hydra_ray.driver.generation import WorkersLostError
from hydra_ray.driver.journal import Journal
from planner.errors import HydraError

if TYPE_CHECKING:
    from hydra_ray.driver.calls import Answers


MOST_ABANDONED = 3


class Saving:
    """Writes checkpoints while training goes on, one at a time.

    A worker that is lost before its share is written takes the checkpoint with it: its folder
    never gets a manifest.

    Args:
        checkpoints: where they go.
        crew: the workers that write them.
        journal: told of each checkpoint once it is valid.
        keep: newest checkpoints to keep.
        timeout_s: limit of writing one.
    """

    def __init__(
        self, checkpoints: Checkpoints, crew: Crew, journal: Journal, *, keep: int, timeout_s: float
    ) -> None:
        self._checkpoints, self._crew, self._journal = checkpoints, crew, journal
        self._keep, self._timeout_s = keep, timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
        self._pending: tuple[Manifest, Future[Answers], float] | None = None
        self._valid_step, self._num_abandoned = 0, 0

    @property
    def last_step(self) -> int:
        """The step of the newest checkpoint that is valid or in writing; 0 before any."""
        return self._pending[0].step if self._pending else self._valid_step

    def restored(self, step: int) -> None:
        """The run goes on from the checkpoint of `step`."""
        self._valid_step = step

    def start(self, workers: Sequence[int], manifest: Manifest) -> None:
        """Have every worker copy its share and begin to write it; waits for the copies only.

        Args:
            workers: the members of the standing generation.
            manifest: what is saved, without its shards.

        Raises:
            WorkersLostError: a worker was lost; there will be no such checkpoint.
        """
        self.settle(wait=True)
        self._checkpoints.prepare(manifest.step)
        folder, started = self._checkpoints.folder(manifest.step), time.monotonic()
        copied = self._crew.call(
            workers, "start_save", lambda _: (folder,), timeout_s=self._timeout_s
        )
        written = self._thread.submit(
            self._crew.call, workers, "finish_save", lambda _: (), timeout_s=self._timeout_s
        )
        if not copied.complete:
            raise WorkersLostError(copied.lost)
        self._pending = (manifest, written, started)

    def settle(self, *, wait: bool) -> None:
        """Make the checkpoint in writing valid if all its shards are written.

        Raises:
            CheckpointError: several in a row could not be written.
        """
        if self._pending is None or not (wait or self._pending[1].done()):
            return
        (manifest, written, started), self._pending = self._pending, None
        answers = written.result(timeout=self._timeout_s + 60)
        if not answers.complete:
            self._abandon(manifest.step, "; ".join([*answers.lost.values()]))
            return
        shards = tuple(shard for share in answers.results.values() for shard in share)
        self._checkpoints.commit(replace(manifest, shards=shards))
        self._valid_step, self._num_abandoned = manifest.step, 0
        self._checkpoints.retain(self._keep)
        self._journal.event(
            "checkpoint",
            step=manifest.step,
            folder=self._checkpoints.folder(manifest.step),
            took_s=time.monotonic() - started,
        )

    def _abandon(self, step: int, cause: str) -> None:
        self._num_abandoned += 1
        self._journal.event("checkpoint_abandoned", step=step, cause=cause)
        if self._num_abandoned >= MOST_ABANDONED:
            raise CheckpointError(
                "checkpoints cannot be written",
                value=f"{self._checkpoints.folder(step)}: {cause}",
                limit=f"{MOST_ABANDONED} attempts",
                remedy="Free space there, or set checkpoint.path to another place.",
            )

    def close(self) -> None:
        """End the thread, after the checkpoint in writing."""
        self._thread.shutdown(wait=True)


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
            _load(crew, workers, checkpoints.folder(step), manifest, timeout_s)
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


def _load(
    crew: Crew, workers: Sequence[int], folder: str, manifest: Manifest, timeout_s: float
) -> None:
    """Have all workers load; between them they verify every shard once."""
    shares = {w: manifest.shards[at :: len(workers)] for at, w in enumerate(workers)}
    answers = crew.call(workers, "load_shard", lambda w: (folder, shares[w]), timeout_s=timeout_s)
    if not answers.complete:
        raise WorkersLostError(answers.lost)
