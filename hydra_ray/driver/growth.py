"""How long a `scale` may take: each request has its own time, and is given up whole after it."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_ray.driver.requests import Wishes

REGROW_S = 10.0  # several lost at once come back at once: one new generation for them, not many


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
        arrived: the loaded units when one last came or went, in seconds `arrived_at`.
    """

    settled_units: int
    operation: int
    asked_at: float | None = None
    arrived: Sequence[int] = ()
    arrived_at: float = 0.0

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

    def takes_some(self, ready: Sequence[int], *, now_s: float) -> bool:
        """Whether replacements join though others are still missing: none came for a while.

        What a `scale` asks for joins whole, or not at all.
        """
        if ready != self.arrived:
            self.arrived, self.arrived_at = ready, now_s
        return self.asked_at is None and now_s - self.arrived_at >= REGROW_S
