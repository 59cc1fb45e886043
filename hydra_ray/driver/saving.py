"""Writing and reading a checkpoint with the workers of a standing generation."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from hydra_ray.driver.checkpoints import Checkpoints, Manifest
from hydra_ray.driver.crew import Crew
from hydra_ray.driver.errors import CheckpointError
from hydra_ray.driver.generation import WorkersLostError
from hydra_ray.driver.journal import Journal
from planner.errors import HydraError
from workers.errors import CheckpointMismatchError

MOST_FAILURES = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A checkpoint in writing; `done` ends once it is valid, or holds what went wrong."""

    step: int
    done: Future[None]


class Saving:
    """Writes checkpoints while training goes on, one at a time.

    Training pauses while the workers copy their state; a thread of this class waits for their
    shards, makes the checkpoint valid and removes old ones. A worker that is lost before its
    share is written takes the checkpoint with it: its folder never gets a manifest, and the next
    checkpoint's writing removes it.

    Args:
        checkpoints: where they go.
        crew: the workers that write them.
        journal: told of each checkpoint once it is valid, and of each that came to nothing.
        keep: newest checkpoints to keep.
        timeout_s: limit of writing one.
    """

    def __init__(
        self, checkpoints: Checkpoints, crew: Crew, journal: Journal, *, keep: int, timeout_s: float
    ) -> None:
        self._checkpoints, self._crew, self._journal = checkpoints, crew, journal
        self._keep, self._timeout_s = keep, timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
        self._attempt: _Attempt | None = None
        self._valid_step, self._num_failures = 0, 0
        self.abandoned_step: int | None = None  # of the latest attempt, if it came to nothing

    @property
    def last_step(self) -> int:
        """The step of the newest checkpoint that is valid or in writing; 0 before any."""
        return self._attempt.step if self._attempt else self._valid_step

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
            CheckpointError: several in a row could not be written.
        """
        started = time.monotonic()
        self.settle(wait=True)
        folder = self._checkpoints.folder(manifest.step)
        try:
            self._checkpoints.prepare(manifest.step)
        except CheckpointError as error:
            self._give_up(manifest.step, error)
            return
        copied = self._crew.call(
            workers, "start_save", lambda _: (folder,), timeout_s=self._timeout_s
        )
        if not copied.complete:
            raise WorkersLostError(copied.lost)
        self.abandoned_step = None
        pause_s = time.monotonic() - started
        done = self._thread.submit(self._complete, tuple(workers), manifest, started, pause_s)
        self._attempt = _Attempt(manifest.step, done)

    def settle(self, *, wait: bool) -> None:
        """See what became of the checkpoint in writing, if it has ended.

        Args:
            wait: until it has ended.

        Raises:
            CheckpointError: several in a row could not be written.
        """
        if self._attempt is None or not (wait or self._attempt.done.done()):
            return
        attempt, self._attempt = self._attempt, None
        error = attempt.done.exception(timeout=self._timeout_s + 60)
        if error is None:
            self._num_failures = 0
        else:
            self._give_up(attempt.step, error)

    def close(self) -> None:
        """End the thread, after the checkpoint in writing."""
        self._thread.shutdown(wait=True)

    def _complete(
        self, workers: tuple[int, ...], manifest: Manifest, started: float, pause_s: float
    ) -> None:
        written = self._crew.call(workers, "finish_save", lambda _: (), timeout_s=self._timeout_s)
        if not written.complete:
            raise WorkersLostError(written.lost)
        shards = tuple(shard for share in written.results.values() for shard in share)
        self._checkpoints.commit(replace(manifest, shards=shards))
        self._valid_step = manifest.step
        self._journal.event(
            "checkpoint",
            step=manifest.step,
            folder=self._checkpoints.folder(manifest.step),
            num_bytes=sum(shard.num_bytes for shard in shards),
            took_s=time.monotonic() - started,
            pause_s=pause_s,
        )
        self._remove_old(manifest.step)

    def _remove_old(self, newest: int) -> None:
        """Keep to the number wanted; the newest is valid even where none may be removed."""
        try:
            self._checkpoints.retain(self._keep, newest=newest)
        except CheckpointError as error:
            log.warning("old checkpoints stay: %s", error)
            self._journal.event("checkpoints_not_removed", step=newest, cause=str(error))

    def _give_up(self, step: int, error: BaseException) -> None:
        """Tell of an attempt that came to nothing; only what is no worker's loss is counted."""
        self.abandoned_step = step
        folder = self._checkpoints.folder(step)
        log.warning("the checkpoint %s came to nothing: %s", folder, error)
        self._journal.event("checkpoint_abandoned", step=step, cause=str(error))
        if isinstance(error, WorkersLostError):
            return
        self._num_failures += 1
        if self._num_failures >= MOST_FAILURES:
            raise CheckpointError(
                "checkpoints cannot be written",
                value=f"{folder}: {error}",
                limit=f"{MOST_FAILURES} attempts",
                remedy="Free space there, or set checkpoint.path to another place.",
            ) from error


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
        CheckpointMismatchError: the newest whole one is of another model or layout.
        WorkersLostError: a worker was lost.
    """
    steps = checkpoints.steps()
    for step in reversed(steps):
        try:
            manifest = checkpoints.read(step)
            _verify_and_load(crew, workers, checkpoints.folder(step), manifest, timeout_s)
        except CheckpointMismatchError:
            raise
        except HydraError as error:
            log.warning(
                "the checkpoint of step %d is damaged, an older one is due: %s", step, error
            )
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


def _verify_and_load(
    crew: Crew, workers: Sequence[int], folder: str, manifest: Manifest, timeout_s: float
) -> None:
    """Have all workers verify every file once between them, and only then load."""
    shares = {w: manifest.shards[at :: len(workers)] for at, w in enumerate(workers)}
    names = tuple(sorted({shard.path.split("/")[0] for shard in manifest.shards}))
    for method, arguments in (
        ("verify_shards", lambda w: (folder, shares[w])),
        ("load_shards", lambda _: (folder, names)),
    ):
        answers = crew.call(workers, method, arguments, timeout_s=timeout_s)
        if not answers.complete:
            raise WorkersLostError(answers.lost)
