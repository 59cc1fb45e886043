"""The training thread: sees, decides, acts; one turn a step boundary.

What to do is decided in `decisions`; this file carries it out and keeps the two facts a run
consists of: its progress, and the generation that stands.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing

from hydra_ray.data.batches import DataCursor
from hydra_ray.driver.checkpoints import Checkpoints, Manifest
from hydra_ray.driver.crew import Crew
from hydra_ray.driver.decisions import (
    Cause,
    Decision,
    Fail,
    Finish,
    Reform,
    Save,
    Train,
    View,
    Wait,
    decide,
)
from hydra_ray.driver.errors import CheckpointError
from hydra_ray.driver.generation import (
    Generation,
    Rendezvous,
    StateLostError,
    WorkersLostError,
    dissolve,
    form,
)
from hydra_ray.driver.journal import Journal
from hydra_ray.driver.preparation import Preparation, PreparedStep
from hydra_ray.driver.progress import Progress
from hydra_ray.driver.records import cursor_after, refuse_nonfinite, step_record
from hydra_ray.driver.requests import Requests, Wishes
from hydra_ray.driver.roster import Roster
from hydra_ray.driver.saving import Saving, restore_newest
from hydra_ray.driver.settings import Settings
from hydra_ray.driver.states import RunState
from hydra_ray.driver.suspects import Suspects, held_by
from hydra_ray.rundir import RunDirectory
from workers.protocol import StepResult

REFORMING: Mapping[Cause, RunState] = {
    "start": RunState.STARTING,
    "grow": RunState.RESIZING,
    "shrink": RunState.RESIZING,
    "replace": RunState.RESIZING,
    "failure": RunState.RECOVERING,
}
LOOK_AROUND_S = 0.1  # how long a standing run waits before it looks at its requests again


class TrainingLoop:
    """One run, from its first generation to its end.

    Args:
        settings: what the recipe sets.
        crew: the worker processes.
        preparation: makes steps ready.
        checkpoints: where the run saves itself; a valid one there is gone on from.
        directory: the run directory.
        journal: what is told outside.
        requests: what users ask.
        rendezvous: where every generation meets.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        crew: Crew,
        preparation: Preparation,
        checkpoints: Checkpoints,
        directory: RunDirectory,
        journal: Journal,
        requests: Requests,
        rendezvous: Rendezvous,
    ) -> None:
        self._settings, self._crew, self._preparation = settings, crew, preparation
        self._checkpoints, self._directory, self._journal = checkpoints, directory, journal
        self._requests, self._rendezvous = requests, rendezvous
        self._saving = Saving(
            checkpoints,
            crew,
            journal,
            keep=settings.keep,
            timeout_s=settings.timeouts.save_s,
        )
        self._progress = Progress()
        self._generation: Generation | None = None
        self._stands = False
        self._number = max((r["generation"] for r in directory.steps()), default=0)
        self._suspects = Suspects()
        self._still_since = self._trained_at = time.monotonic()
        self._roster = Roster(settings, crew, journal, requests)
        self._unannounced: dict[str, object] | None = None

    def run(self) -> RunState:
        """Train until the last step, a stop, or an error.

        Returns:
            FINISHED or STOPPED.

        Raises:
            HydraError: what ended the run.
        """
        with closing(self._saving):  # a checkpoint in writing is seen to its end, whatever comes
            while True:
                wishes = self._requests.wishes()
                self._roster.recruit(self._members(), wishes, step=self._applied + 1)
                self._saving.settle(wait=False)
                decision = decide(self._view(wishes), self._settings.limits)
                try:
                    end = self._carry_out(decision)
                except WorkersLostError as error:
                    self._stands = False
                    self._roster.lose(error.lost, step=self._applied + 1)
                except StateLostError:  # the next generation restores the newest checkpoint
                    self._journal.event("state_lost", step=self._applied)
                else:
                    if end is not None:
                        return end

    def _carry_out(self, decision: Decision) -> RunState | None:
        """One act; returns how the run ended, if it did."""
        match decision:
            case Train():
                self._train()
            case Save():
                self._save()
            case Reform(units, cause):
                self._reform(units, cause)
            case Wait():
                self._wait()
            case Finish(stopped, is_saved) if self._has_settled():
                self._tell_unsaved(is_saved=is_saved)
                return RunState.STOPPED if stopped else RunState.FINISHED
            case Fail(error):
                raise error
        return None

    def _has_settled(self) -> bool:
        """Wait for the checkpoint in writing; False if it came to nothing, to look again."""
        written = self._saving.last_step
        self._saving.settle(wait=True)
        return self._saving.last_step == written

    def _tell_unsaved(self, *, is_saved: bool) -> None:
        if not is_saved:
            newest = max(self._checkpoints.steps(), default=None)
            self._journal.event("stopped_unsaved", step=self._applied, newest_checkpoint=newest)

    def _view(self, wishes: Wishes) -> View:
        settings = self._settings
        return View(
            applied=self._applied,
            num_steps=settings.num_steps,
            members=self._members(),
            stands=self._stands,
            ready=self._crew.ready(),
            leaving=wishes.leaving,
            num_loading=self._crew.num_loading(),
            target=wishes.target_units,
            takes_some=self._roster.takes_some(wishes),
            num_failures=self._roster.failures.num_recent(),
            waited_s=time.monotonic() - self._still_since,
            stop=wishes.stop,
            save_due=self._save_is_due(ending=wishes.stop, asked=wishes.save),
            last_failure=self._roster.failures.latest,
        )

    def _save_is_due(self, *, ending: bool, asked: bool) -> bool:
        settings, abandoned = self._settings, self._saving.abandoned_step
        if self._applied == self._saving.last_step:
            return False
        if ending or self._applied >= settings.num_steps:
            return True
        if abandoned is not None:  # a step of training first: what was wrong may pass meanwhile
            return self._applied != abandoned
        every = settings.save_every and self._applied % settings.save_every == 0
        return bool(asked or every)

    @property
    def _applied(self) -> int:
        return self._progress.applied

    def _members(self) -> tuple[int, ...]:
        """The units of the latest generation; () before the first."""
        return self._generation.units if self._generation else ()

    def _train(self) -> None:
        generation = self._standing()
        self._journal.enter(RunState.RUNNING)
        prepared = self._preparation.take(self._progress.next_key(generation))
        self._progress.in_flight = prepared
        if prepared.key.step < self._settings.num_steps:
            self._preparation.start(self._progress.key_after_next(generation))
        self._announce()
        started = time.monotonic()
        answers = self._crew.call(
            generation.workers,
            "run_step",
            lambda _: (prepared.command, [prepared.payload]),
            timeout_s=self._settings.timeouts.step_s,
        )
        self._still_since = time.monotonic()
        results = list(answers.results.values())
        refuse_nonfinite(prepared.key.step, results)
        if results:
            self._trained_at = self._still_since
            self._land(prepared, results, wall_s=self._trained_at - started)
        if not answers.complete:
            if answers.culprits and not results:
                ids = held_by(generation, prepared, answers.culprits, self._settings.shape)
                self._suspects.blame(prepared.key.step, ids)
            raise WorkersLostError(answers.lost)

    def _land(
        self, prepared: PreparedStep, results: Sequence[StepResult], *, wall_s: float
    ) -> None:
        """The step in flight is applied, and told."""
        self._progress.land()
        self._journal.step(step_record(prepared, results, self._settings.cost, wall_s=wall_s))
        self._directory.append_trace(entry for r in results for entry in r.trace_events)

    def _announce(self) -> None:
        """Tell of a new generation once its pause is over, or the next one is due."""
        if self._unannounced is not None:
            pause_s = time.monotonic() - self._trained_at
            self._journal.event("generation", **self._unannounced, pause_s=pause_s)
            self._unannounced = None

    def _reform(self, units: tuple[int, ...], cause: Cause) -> None:
        settings, started = self._settings, time.monotonic()
        self._journal.enter(REFORMING[cause])
        self._announce()  # one that no step went out to before it was replaced
        whole = self._view(self._requests.wishes()).whole
        self._stands = False
        if whole:
            dissolve(self._crew, self._standing(), timeout_s=settings.timeouts.form_s)
        self._number += 1
        generation = form(
            self._crew,
            self._number,
            units,
            pool=settings.pool_of(len(units)),
            shape=settings.shape,
            rendezvous=self._rendezvous,
            timeout_s=settings.timeouts.form_s,
        )
        self._agree(generation)
        self._generation, self._stands = generation, True
        self._crew.discard(self._requests.wishes().leaving - set(units))
        self._know(generation, cause, form_s=time.monotonic() - started)

    def _know(self, generation: Generation, cause: Cause, *, form_s: float) -> None:
        """Keep what is to be told of a new generation."""
        workers, num_ranks = generation.workers, generation.pool.num_ranks
        self._unannounced = {
            "generation": generation.number,
            "cause": cause,
            "workers": list(workers),
            "num_ranks": num_ranks,
            "applied": self._applied,
            "form_s": form_s,
        }
        self._journal.know(
            generation=generation.number,
            num_workers=len(workers),
            num_ranks=num_ranks,
            workers=self._crew.whereabouts(workers),
        )

    def _agree(self, generation: Generation) -> None:
        """Bring the driver's step and the pool's together; the furthest living state is the truth.

        The pool may be behind when every member was lost and only standbys are left, which hold
        nothing, or what they had when they were last members.
        """
        held = generation.applied
        flying = self._progress.in_flight
        if flying is not None and held == flying.key.step:
            # A worker applied it, but every report of it was lost: nothing to redo.
            self._land(flying, [], wall_s=0.0)
        elif 0 < held < self._applied and held >= max(self._checkpoints.steps(), default=0):
            self._rewind(held, cursor_after(self._directory, held))
        elif held == 0 or held < self._applied:
            self._restore(generation)
        elif held > self._applied:
            raise CheckpointError(
                "the workers hold a later step than the driver",
                value=held,
                limit=self._applied,
                remedy="Continue from the last checkpoint with --resume.",
            )

    def _restore(self, generation: Generation) -> None:
        """Fresh workers take the newest checkpoint; without any, the run is at step 0."""
        self._saving.settle(wait=True)
        manifest = restore_newest(
            self._checkpoints,
            self._crew,
            generation.workers,
            self._journal,
            timeout_s=self._settings.timeouts.save_s,
        )
        if manifest is None:
            self._rewind(0, DataCursor())
        else:
            self._rewind(manifest.step, manifest.cursor)

    def _rewind(self, applied: int, cursor: DataCursor) -> None:
        self._progress.rewind(applied, cursor)
        self._saving.restored(applied)
        dropped = self._directory.cut_steps(applied)
        if applied or dropped:
            self._journal.event("restored", step=applied, steps_to_redo=dropped)

    def _save(self) -> None:
        generation = self._standing()
        self._announce()  # the pause of what it tells of ends here
        self._journal.enter(RunState.SAVING)
        self._saving.start(
            generation.workers,
            Manifest(
                step=self._applied,
                cursor=self._progress.cursor,
                seed=self._settings.seed,
                num_ranks=generation.pool.num_ranks,
                corpus=self._settings.corpus,
                config=self._settings.config,
                shards=(),
            ),
        )
        self._requests.saved()
        self._still_since = self._trained_at = time.monotonic()

    def _wait(self) -> None:
        if self._generation is not None:
            self._journal.enter(RunState.WAITING)
        if self._crew.num_loading():
            self._roster.watch(LOOK_AROUND_S, step=self._applied + 1)
        else:
            self._requests.wait(LOOK_AROUND_S)

    def _standing(self) -> Generation:
        if self._generation is None:
            raise RuntimeError("no generation stands")
        return self._generation
