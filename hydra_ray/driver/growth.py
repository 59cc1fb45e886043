"""How long a `scale` may take: each request has its own time, and is given up whole after it."""

from dataclasses import dataclass

from hydra_ray.driver.requests import Wishes


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
