"""What the engine measures in one microbatch: bytes sent, seconds waited, seconds in kernels.

On a GPU the host runs ahead of the device, so spans there are pairs of CUDA events, read when
somebody asks for the sums; elsewhere they are wall clock.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

SpanKind = Literal["kernel", "wait"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something the engine did: `name` such as "forward launch query", host clock in seconds.

    Launches and marks are moments: their start is their end.
    """

    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Counters:
    """Sums over one microbatch on one rank, forward and backward, all layers.

    Args:
        keep_events: also keep a log of events, in the order in which they happened.
        bytes_sent: bytes that left this rank, by kind: "all_to_all", "ring".
        events: the log; stays empty unless `keep_events`.
    """

    keep_events: bool = False
    bytes_sent: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    _seconds: dict[SpanKind, float] = field(default_factory=lambda: {"kernel": 0.0, "wait": 0.0})
    _pending: list[tuple[SpanKind, torch.cuda.Event, torch.cuda.Event]] = field(
        default_factory=list
    )

    def sent(self, kind: str, num_bytes: int) -> None:
        """Count bytes that leave this rank."""
        self.bytes_sent[kind] = self.bytes_sent.get(kind, 0) + num_bytes

    def mark(self, name: str) -> None:
        """Log a moment."""
        if self.keep_events:
            now = time.perf_counter()
            self.events.append(Event(name, now, now))

    @contextmanager
    def span(self, kind: SpanKind, name: str, device: torch.device) -> Iterator[None]:
        """Time the block: its kernels, or how long it waits for a collective."""
        start_s = time.perf_counter()
        marks = (_cuda_mark(), _cuda_mark()) if device.type == "cuda" else None
        if marks:
            marks[0].record()
        yield
        if marks:
            marks[1].record()
            self._pending.append((kind, *marks))
        end_s = time.perf_counter()
        if not marks:
            self._seconds[kind] += end_s - start_s
        if self.keep_events:
            self.events.append(Event(name, start_s, end_s))

    @property
    def kernel_s(self) -> float:
        """Seconds in attention kernels. Waits for the device if it is a GPU."""
        return self._sum("kernel")

    @property
    def exposed_wait_s(self) -> float:
        """Seconds in which computation stood still for a collective. Waits for a GPU."""
        return self._sum("wait")

    def _sum(self, kind: SpanKind) -> float:
        for pending_kind, first, last in self._pending:
            last.synchronize()
            self._seconds[pending_kind] += first.elapsed_time(last) / 1000
        self._pending.clear()
        return self._seconds[kind]


def _cuda_mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
