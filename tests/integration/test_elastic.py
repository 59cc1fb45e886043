"""Workers die, freeze, come and go; the training goes on as if nothing had happened."""

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

from hydra_ray.driver.journal import Line
from tests.integration.conftest import Run, running

STEPS = 40
LOSS_TOLERANCE = 1e-4  # fp32 sums in another order for each pool


def at_steps(run: Run, acts: dict[int, Callable[[], Any]]) -> Callable[[Line], None]:
    """Carry out each act as soon as its step is seen."""
    left = dict(acts)

    def show(line: Line) -> None:
        if line.kind == "step":
            for step in [s for s in left if s <= line.record["step"]]:
                left.pop(step)()

    return show


def signal_worker(run: Run, rank: int, number: int) -> Callable[[], None]:
    def act() -> None:
        workers = ray.get(run.driver.status.remote(), timeout=30)["workers"]
        os.kill(workers[rank % len(workers)]["pid"], number)

    return act


def scale(run: Run, num_workers: int) -> Callable[[], None]:
    return lambda: ray.get(run.driver.scale.remote(num_workers), timeout=30)


def assert_as_if_nothing_happened(run: Run, uninterrupted: Run) -> None:
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert run.ids() == uninterrupted.ids()
    np.testing.assert_allclose(run.losses(), uninterrupted.losses(), rtol=0, atol=LOSS_TOLERANCE)


@pytest.mark.timeout(300)
def test_kills_and_scales_change_nothing(cluster, recipe_of, uninterrupted):
    recipe = recipe_of(
        steps=STEPS, workers=3, elastic={"standbys": 1, "heartbeat_s": 1.0, "grow_timeout_s": 300.0}
    )
    with running(recipe, "elastic") as run:
        acts = {
            5: signal_worker(run, 1, signal.SIGKILL),
            12: scale(run, 2),
            20: signal_worker(run, 0, signal.SIGKILL),
            28: signal_worker(run, 1, signal.SIGSTOP),
        }
        run.finish(at_steps(run, acts))
    assert_as_if_nothing_happened(run, uninterrupted)
    causes = [event["cause"] for event in run.events("generation")]
    assert causes[0] == "start"
    assert causes.count("failure") >= 3
    assert "shrink" in causes


@pytest.mark.timeout(300)
def test_a_sharded_optimizer_keeps_its_state_when_the_pool_changes_size(
    cluster, recipe_of, uninterrupted
):
    optimizer = {"lr": 3e-3, "warmup_steps": 3, "distributed_optimizer": True}
    elastic = {"max_failures": 0, "max": 3, "grow_timeout_s": 300.0}
    recipe = recipe_of(steps=STEPS, workers=3, optimizer=optimizer, elastic=elastic)
    with running(recipe, "sharded") as run:
        run.finish(at_steps(run, {6: scale(run, 2), 16: scale(run, 3)}))
    assert_as_if_nothing_happened(run, uninterrupted)
    assert [e["cause"] for e in run.events("generation")][:2] == ["start", "shrink"]
    assert run.events("restored") == []
