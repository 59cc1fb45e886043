"""Finds workers that are dead or frozen while no call of theirs would tell.

Ray needs a minute to notice a frozen process; this thread asks every loaded worker, on its
control threads, and ends for certain whoever stays silent.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

import ray
from ray.exceptions import RayActorError, RayError

from hydra_ray.driver.worker import Worker, end_process

log = logging.getLogger(__name__)

SILENT_BEATS = 5


class Heartbeat(threading.Thread):
    """Asks every `period_s`; a worker that has not answered for five periods is ended.

    Args:
        workers: gives the loaded workers by id; called from this thread.
        period_s: seconds between two rounds.
    """

    def __init__(self, workers: Callable[[], Mapping[int, Worker]], period_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._workers, self._period_s = workers, period_s
        self._heard: dict[int, float] = {}
        self._lost: dict[int, str] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def run(self) -> None:
        """Ask until closed."""
        while not self._closing.wait(self._period_s):
            self._ask(self._workers())

    def close(self) -> None:
        """End the thread after the round in hand."""
        self._closing.set()

    def lost(self) -> dict[int, str]:
        """The workers found dead or frozen so far, with the cause."""
        with self._lock:
            return dict(self._lost)

    def _ask(self, workers: Mapping[int, Worker]) -> None:
        now = time.monotonic()
        refs = {worker.actor.heartbeat.remote(): w for w, worker in workers.items()}
        if not refs:
            return
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=self._period_s)
        for ref in done:
            self._hear(ref, refs[ref])
        self._heard = {w: self._heard.get(w, now) for w in workers}
        for w, worker in workers.items():
            silent_s = time.monotonic() - self._heard[w]
            if silent_s > SILENT_BEATS * self._period_s:
                self._declare(w, f"no heartbeat for {silent_s:.1f} s")
                end_process(worker)

    def _hear(self, ref: object, worker: int) -> None:
        try:
            ray.get(ref, timeout=self._period_s)
        except RayActorError as error:
            self._declare(worker, f"{type(error).__name__} at its heartbeat")
        except RayError as error:
            log.warning("heartbeat of worker %d: %s", worker, error)
        else:
            self._heard[worker] = time.monotonic()

    def _declare(self, worker: int, cause: str) -> None:
        with self._lock:
            self._lost.setdefault(worker, cause)
