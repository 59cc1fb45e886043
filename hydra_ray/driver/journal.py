"""What a run tells the outside: its state, steps and events, to files and to whoever follows."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hydra_ray.driver.states import FINAL, RunState, advance
from hydra_ray.rundir import RunDirectory

KEPT_LINES = 10_000


@dataclass(frozen=True, slots=True)
class Line:
    """One thing to show: `kind` is "step" or "event"."""

    number: int
    kind: str
    record: Mapping[str, Any]


class Journal:
    """What is told outside; written and read from any thread.

    Args:
        directory: the files steps and events are appended to.
        listener: is told every line, on the writing thread.
    """

    def __init__(
        self, directory: RunDirectory, listener: Callable[[Line], None] = lambda _: None
    ) -> None:
        self._directory, self._listener = directory, listener
        self._state = RunState.STARTING
        self._lines: deque[Line] = deque(maxlen=KEPT_LINES)
        self._num_lines = 0
        self._facts: dict[str, Any] = {}
        self._news = threading.Condition()

    @property
    def state(self) -> RunState:
        """What the run is doing."""
        return self._state

    def enter(self, state: RunState, **facts: Any) -> None:
        """Go to `state`; a change is an event.

        Raises:
            IllegalTransitionError: the state table forbids it.
        """
        changed = state != self._state
        following = advance(self._state, state)
        if changed:
            self.event("state", state=str(state), **facts)
        with self._news:
            self._state = following
            self._news.notify_all()

    def step(self, record: Mapping[str, Any]) -> None:
        """Report one completed step."""
        self._directory.append_step(dict(record))
        self._add("step", {k: v for k, v in record.items() if k != "sequence_ids"})

    def event(self, event: str, **facts: Any) -> None:
        """Report one event."""
        self._add("event", self._directory.append_event(event, **facts))

    def know(self, **facts: Any) -> None:
        """Keep facts for `status`."""
        with self._news:
            self._facts.update(facts)

    def status(self) -> dict[str, Any]:
        """The state, the latest facts and the latest step."""
        with self._news:
            latest = next((ln.record for ln in reversed(self._lines) if ln.kind == "step"), None)
            return {"state": str(self._state), **self._facts, "last_step": latest}

    def follow(self, after: int, timeout_s: float) -> tuple[list[Line], RunState]:
        """The lines numbered above `after`, waiting for one unless the run has ended."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while self._num_lines <= after and self._state not in FINAL:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._news.wait(left_s)
            return [line for line in self._lines if line.number > after], self._state

    def _add(self, kind: str, record: Mapping[str, Any]) -> None:
        with self._news:
            self._num_lines += 1
            line = Line(self._num_lines, kind, record)
            self._lines.append(line)
            self._news.notify_all()
        self._listener(line)
