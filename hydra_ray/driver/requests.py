"""What users ask of a live run: set by control threads, read by the training thread.

A request only records a wish; the training thread acts on it at the next step boundary. Of a
burst of `scale` requests the last one counts.
"""

import threading
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What is asked for now.

    Args:
        target_units: the scale units wanted.
        operation: the number of the latest `scale`; 0 before any.
        stop: end the run.
        save: write a checkpoint.
        leaving: units to retire for good.
    """

    target_units: int
    operation: int = 0
    stop: bool = False
    save: bool = False
    leaving: frozenset[int] = field(default_factory=frozenset)


class Requests:
    """The wishes, shared between threads."""

    def __init__(self, target_units: int) -> None:
        self._wishes = Wishes(target_units=target_units)
        self._changed = threading.Condition()

    def wishes(self) -> Wishes:
        """What is asked for now; never blocks for long."""
        with self._changed:
            return self._wishes

    def scale(self, target_units: int) -> int:
        """Ask for `target_units`; returns the operation's number."""
        with self._changed:
            operation = self._wishes.operation + 1
            self._set(target_units=target_units, operation=operation)
            return operation

    def stop(self) -> None:
        """Ask the run to end after the step in hand."""
        with self._changed:
            self._set(stop=True)

    def save(self) -> None:
        """Ask for a checkpoint."""
        with self._changed:
            self._set(save=True)

    def saved(self) -> None:
        """The checkpoint that was asked for is written."""
        with self._changed:
            self._set(save=False)

    def retire(self, unit: int) -> None:
        """Ask for a unit to leave the pool for good."""
        with self._changed:
            self._set(leaving=self._wishes.leaving | {unit})

    def withdraw_growth(self, operation: int, target_units: int) -> None:
        """Growth failed: want `target_units` again, unless a newer request came meanwhile."""
        with self._changed:
            if self._wishes.operation == operation:
                self._set(target_units=target_units)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a request comes, or the time is up."""
        with self._changed:
            self._changed.wait(timeout_s)

    def _set(self, **changes: object) -> None:
        self._wishes = replace(self._wishes, **changes)  # type: ignore[arg-type]
        self._changed.notify_all()
