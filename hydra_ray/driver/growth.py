"""How a pool gets more units: a `scale` in its time and whole, replacements as they come."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_ray.driver.requests import Wishes

REGROW_S = 10.0


@dataclass(slots=True)
class Growth:
    """The latest `scale`, until the pool has what it asks for.

    Lost members and standbys have no such time: their replacements are waited for, and the
    target stays.

    Args:
        settled_units: the target of the latest request that was met; what a failed one falls
            back to.
        operation: the number of the latest request seen.
        asked_at: when that request was seen, in seconds; None once it is met or given up.
    """

    settled_units: int
    operation: int
    asked_at: float | None = None

    def fallback(
        self, wishes: Wishes, *, num_members: int, now_s: float, patience_s: float
    ) -> int | None:
        """The target to return to if the request's time is up; else None.

        A request before the first generation only changes what the run starts with.
        """
        if wishes.operation != self.operation:
            self.operation, self.asked_at = wishes.operation, now_s
        if self.asked_at is None:
            return None
        if not num_members or wishes.target_units <= num_members:
            self.settled_units, self.asked_at = wishes.target_units, None
        elif now_s - self.asked_at > patience_s:
            self.asked_at = None
            return self.settled_units
        return None

    def is_settled(self, operation: int) -> bool:
        """Whether no request is open, the one numbered `operation` included."""
        return self.asked_at is None and operation == self.operation


@dataclass(slots=True)
class Arrivals:
    """When a loaded unit last came or went.

    Several that are lost at once are replaced at about the same time: while they come they are
    waited for, so that one new generation takes them all.
    """

    ready: Sequence[int] = ()
    changed_at: float = 0.0

    def see(self, ready: Sequence[int], *, now_s: float) -> None:
        """These are loaded now."""
        if tuple(ready) != tuple(self.ready):
            self.ready, self.changed_at = ready, now_s

    def have_ended(self, *, now_s: float) -> bool:
        """Whether none came for a while: whoever is still missing is not waited for."""
        return now_s - self.changed_at >= REGROW_S
