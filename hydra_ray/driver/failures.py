"""Worker failures of the recent past: how many, and how the latest one reads."""

import time
from collections import deque


class Failures:
    """Counts failures within a window that moves with the clock.

    Args:
        window_s: what is longer ago is forgotten.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times: deque[float] = deque()
        self.latest = ""

    def add(self, text: str) -> None:
        """One happened now."""
        self._times.append(time.monotonic())
        self.latest = text

    def num_recent(self) -> int:
        """Those within the window."""
        oldest = time.monotonic() - self._window_s
        while self._times and self._times[0] < oldest:
            self._times.popleft()
        return len(self._times)
