"""A driver's other threads answer while its plan is computed."""

import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from benchmarks.lengths import draw_batch
from planner import packing_heap
from planner.opt import planner as opt_planner
from planner.opt import search as opt_search
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.registry import get_planner

ATTEMPTS = 1000
KERNELS = {
    "hydra": (packing_heap, "_pack"),
    "hydra-opt": (opt_planner, "make_draft"),
    "hydra-opt, targets": (opt_search, "explore"),
}


# The first test that plans compiles: seconds on an idle machine, minutes on a crowded one.
pytestmark = pytest.mark.timeout(600)


class Ticker(threading.Thread):
    """Counts, and lets everyone else run after each count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ticks, self.is_done = 0, False

    def run(self) -> None:
        while not self.is_done:
            self.ticks += 1
            time.sleep(0)


@pytest.fixture
def ticker() -> Iterator[Ticker]:
    """Threads change only where Python's lock is let go of, never because time has passed."""
    interval = sys.getswitchinterval()
    thread = Ticker()
    thread.start()
    sys.setswitchinterval(1e6)
    yield thread
    thread.is_done = True
    sys.setswitchinterval(interval)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("case", KERNELS)
def test_another_thread_runs_while_a_kernel_does(
    ticker: Ticker, monkeypatch: pytest.MonkeyPatch, case: str
):
    module, name = KERNELS[case]
    lengths = draw_batch(20_000_000, context=262_144, seed=1)
    pool = PoolShape(num_ranks=64, token_budget=16_384)
    planner = get_planner(case.split(",", maxsplit=1)[0])
    planner.plan(lengths, pool, DENSE)  # compiled, or read from disk
    counted = count_ticks_within(module, name, ticker, monkeypatch)
    for _ in range(ATTEMPTS):  # on a busy machine the other thread may come too late for one
        planner.plan(lengths, pool, DENSE)
        if sum(counted):
            return
    pytest.fail(f"no other thread ran in {len(counted)} calls of {name}")


def count_ticks_within(
    module: ModuleType, name: str, ticker: Ticker, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """How far the ticker came during each call of a kernel, from now on."""
    kernel, counted = getattr(module, name), []

    def watched(*arguments: Any) -> Any:
        before = ticker.ticks
        result = kernel(*arguments)
        counted.append(ticker.ticks - before)
        return result

    monkeypatch.setattr(module, name, watched)
    return counted
