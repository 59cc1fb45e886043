"""Who is there to train: recruits spare units, and notes who is lost."""

import time
from collections.abc import Mapping, Sequence

from hydra_ray.driver.crew import Crew
from hydra_ray.driver.decisions import wanted_units
from hydra_ray.driver.failures import Failures
from hydra_ray.driver.growth import Arrivals, Growth
from hydra_ray.driver.journal import Journal
from hydra_ray.driver.requests import Requests, Wishes
from hydra_ray.driver.settings import Settings


class Roster:
    """Keeps the crew at what is wished for; belongs to the training thread.

    Args:
        settings: what the recipe sets.
        crew: the worker processes.
        journal: told of every loss.
        requests: what users ask.
    """

    def __init__(
        self, settings: Settings, crew: Crew, journal: Journal, requests: Requests
    ) -> None:
        self._settings, self._crew = settings, crew
        self._journal, self._requests = journal, requests
        self.failures = Failures(settings.failure_window_s)
        wishes = requests.wishes()
        self._growth = Growth(wishes.target_units, wishes.operation)
        self._arrivals = Arrivals()

    def recruit(self, members: Sequence[int], wishes: Wishes, *, step: int) -> None:
        """Start and end spare units so that the target and the standbys can be met.

        Args:
            members: the units of the latest generation.
            wishes: what is asked for now.
            step: the one that a loss seen now belongs to.
        """
        self.watch(0, step=step)
        settings = self._settings
        self._crew.discard(wishes.leaving - set(members))
        leaving = wishes.leaving & set(members)
        wanted = wanted_units(wishes.target_units, settings.limits) + settings.standbys
        if not wishes.stop:
            self._crew.staff(wanted + len(leaving), keep=members)
        ready = self._crew.ready()
        self._arrivals.see(ready, now_s=time.monotonic())
        num_standbys = len(set(ready) - set(members))
        self._journal.know(num_standbys=num_standbys, num_loading=self._crew.num_loading())
        self._limit_growth(wishes, len(members))

    def _limit_growth(self, wishes: Wishes, num_members: int) -> None:
        """Withdraw a `scale` that was not met in time."""
        kept = self._growth.fallback(
            wishes,
            num_members=num_members,
            now_s=time.monotonic(),
            patience_s=self._settings.timeouts.grow_s,
        )
        if kept is not None:
            self._requests.withdraw_growth(wishes.operation, kept)
            self._journal.event("growth_failed", wanted=wishes.target_units, kept=kept)

    def takes_some(self, wishes: Wishes) -> bool:
        """Whether replacements join though others are still missing.

        What a `scale` asks for joins whole, or not at all.
        """
        settled = self._growth.is_settled(wishes.operation)
        return settled and self._arrivals.have_ended(now_s=time.monotonic())

    def watch(self, timeout_s: float, *, step: int) -> None:
        """Let loading units arrive, for at most `timeout_s`, and note those that are lost."""
        for unit, cause in self._crew.watch(timeout_s).items():
            self._note(f"unit {unit}: {cause}", step)

    def lose(self, lost: Mapping[int, str], *, step: int) -> None:
        """Some workers cannot be trusted any more: end their units, and count one failure each."""
        units = {
            unit: causes
            for unit in self._crew.ready()
            if (causes := [lost[w] for w in self._crew.workers_of(unit) if w in lost])
        }
        self._crew.discard(units)
        for unit, causes in units.items():
            self._note(f"unit {unit}: {'; '.join(causes)}", step)

    def _note(self, text: str, step: int) -> None:
        self.failures.add(text)
        self._journal.event("worker_lost", step=step, cause=text)
