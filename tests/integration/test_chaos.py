"""Long runs under random kills, freezes and scales: the same training, and nothing leaks."""

import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from tests.integration.conftest import running
from tests.integration.test_elastic import (
    LOSS_TOLERANCE,
    at_steps,
    scale,
    signal_worker,
)

GAP = 4  # steps between two acts: one is over before the next, and a loss comes once a step


def random_acts(
    run: Any, rng: np.random.Generator, acts: list[str]
) -> dict[int, Callable[[], Any]]:
    """The acts in random order, each on a random worker or size."""
    plan: dict[int, Callable[[], Any]] = {}
    for i, act in enumerate(rng.permutation(acts)):
        rank = int(rng.integers(4))
        plan[GAP * (i + 1)] = {
            "kill": signal_worker(run, rank, signal.SIGKILL),
            "freeze": signal_worker(run, rank, signal.SIGSTOP),
            "scale": scale(run, int(rng.integers(2, 5))),
        }[act]
    return plan


def footprint(run: Any) -> tuple[int, int]:
    """Threads and open files of the driver."""
    driver = psutil.Process(ray.get(run.driver.status.remote(), timeout=60)["driver_pid"])
    return driver.num_threads(), driver.num_fds()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10))
def test_sixty_steps_with_twelve_changes_equal_the_undisturbed(cluster, recipe_of, seed):
    rng = np.random.default_rng(seed)
    elastic = {"standbys": 1, "grow_timeout_s": 300.0, "max_failures": 50}
    with running(recipe_of(steps=60), f"calm-{seed}") as calm:
        calm.finish()
    recipe = recipe_of(steps=60, workers=3, elastic=elastic, checkpoint={"every_steps": 7})
    with running(recipe, f"storm-{seed}") as run:
        run.finish(at_steps(run, random_acts(run, rng, ["kill"] * 6 + ["scale"] * 6)))
    assert run.ids() == calm.ids()
    np.testing.assert_allclose(run.losses(), calm.losses(), rtol=0, atol=LOSS_TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_changes_leave_every_sequence_once_and_leak_nothing(cluster, recipe_of):
    acts = ["kill"] * 90 + ["freeze"] * 10 + ["scale"] * 100
    steps = GAP * (len(acts) + 2)
    elastic = {
        "standbys": 1,
        "heartbeat_s": 1.0,
        "grow_timeout_s": 300.0,
        "max_failures": 1000,
    }
    recipe = recipe_of(steps=steps, workers=3, elastic=elastic)
    sizes: list[tuple[int, int]] = []
    with running(recipe, "storm") as run:
        plan = random_acts(run, np.random.default_rng(0), acts)
        plan |= {2: lambda: sizes.append(footprint(run))}
        plan |= {steps - 2: lambda: sizes.append(footprint(run))}
        run.finish(at_steps(run, plan))
    assert [step["step"] for step in run.steps()] == list(range(1, steps + 1))
    ids = [i for batch in run.ids() for i in batch]
    whole_epochs = len(ids) // 120 * 120
    counts = np.bincount(np.array(ids[:whole_epochs]) - 5000)
    assert set(counts.tolist()) == {whole_epochs // 120}
    (threads, files), (threads_after, files_after) = sizes
    assert threads_after <= threads + 8
    assert files_after <= files + 16
