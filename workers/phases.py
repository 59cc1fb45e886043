"""When a rank did what in one step: wall and CPU time of its microbatches, and a trace of it.

Without a pipeline a microbatch's slot runs from its forward to the next one's: its forward and
backward. In a pipeline other microbatches' backwards fall between; then a slot says what was
measured, and the trace shows what it held.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from workers.attention.counters import Event


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a step, on this process's monotonic clock."""

    name: str
    start_s: float
    end_s: float


class StepClock:
    """Measures one step of one rank.

    Args:
        num_microbatches: slots to fill.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.wall_s = [0.0] * num_microbatches
        self.cpu_s = [0.0] * num_microbatches
        self.phases: list[Phase] = []
        self._running: tuple[int, float, float] | None = None

    def enter_microbatch(self, microbatch: int) -> None:
        """The slot of `microbatch` begins, the running one ends."""
        self.leave_microbatch()
        self._running = (microbatch, time.perf_counter(), time.thread_time())

    def leave_microbatch(self) -> None:
        """The running slot ends."""
        if self._running is None:
            return
        microbatch, wall_s, cpu_s = self._running
        end_s = time.perf_counter()
        self.wall_s[microbatch] += end_s - wall_s
        self.cpu_s[microbatch] += time.thread_time() - cpu_s
        self.phases.append(Phase(f"microbatch {microbatch}", wall_s, end_s))
        self._running = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is one phase."""
        start_s = time.perf_counter()
        yield
        self.phases.append(Phase(name, start_s, time.perf_counter()))


def chrome_trace(
    rank: int, phases: Iterable[Phase], events: Iterable[Event]
) -> tuple[dict[str, Any], ...]:
    """Slices in Chrome's trace format, which Perfetto reads: one track a rank.

    Times are microseconds of the system's wall clock, so that the ranks' tracks line up as well
    as their machines' clocks do. What the engine did nests within the phases.
    """
    offset_s = time.time() - time.perf_counter()
    spans = [(p.name, p.start_s, p.end_s) for p in phases]
    spans += [(event.name, event.start_s, event.end_s) for event in events]
    return tuple(
        {
            "name": name,
            "ph": "X",
            "ts": round((start_s + offset_s) * 1e6, 1),
            "dur": round((end_s - start_s) * 1e6, 1),
            "pid": 0,
            "tid": rank,
        }
        for name, start_s, end_s in sorted(spans, key=lambda span: (span[1], -span[2]))
    )
