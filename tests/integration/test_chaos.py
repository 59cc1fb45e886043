"""Long runs under random kills, freezes and scales: the same training, and nothing leaks."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from hydra_ray.driver.checkpoints import Checkpoints
from tests.integration.conftest import ENDLESS, Run, footprint, running
from tests.integration.mortal import PHASES, mortal_runtime, order
from tests.integration.node import wait_until
from tests.integration.test_elastic import (
    LOSS_TOLERANCE,
    STEPS,
    assert_as_if_nothing_happened,
    at_steps,
    scale,
    signal_worker,
)
from workers import checkpoint
from workers.shard_files import shard_reader

WEIGHT_TOLERANCE = 1e-3  # of a weight's own norm
WORKERS_END_S = 60.0  # they end by themselves in seconds; the rest is for a machine under load
STORED_TOKENS = 32_768  # a batch's payload is then large enough for Ray's object store
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


def free_object_store_bytes() -> int:
    return int(ray.available_resources()["object_store_memory"])


def final_weights(run: Run) -> dict[str, torch.Tensor]:
    """The weights of the checkpoint that a run writes at its end, by name."""
    checkpoints = Checkpoints(run.directory.checkpoints)
    step = checkpoints.steps()[-1]
    folder = checkpoints.folder(step)
    names = sorted({shard.path.split("/")[0] for shard in checkpoints.read(step).shards})
    wanted = {}
    for name in names:
        stored = shard_reader(f"{folder}/{name}").read_metadata().state_dict_metadata
        weights = {key: entry for key, entry in stored.items() if key.startswith("weight/")}
        wanted |= {k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in weights.items()}
    return dict(checkpoint.read(folder, names, wanted).tensors)


def assert_same_weights(run: Run, undisturbed: Run) -> None:
    expected, weights = final_weights(undisturbed), final_weights(run)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        apart = torch.linalg.vector_norm(weights[name] - weight)
        assert apart <= WEIGHT_TOLERANCE * torch.linalg.vector_norm(weight), name


def living_workers() -> list[int]:
    """Worker processes of the tests' own Ray, frozen ones too."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:  # it ended meanwhile
            continue
        if title.startswith("ray::HydraWorker"):
            found.append(process.pid)
    return found


def assert_no_worker_is_left() -> None:
    deadline = time.monotonic() + WORKERS_END_S
    while left := living_workers():
        assert time.monotonic() < deadline, f"worker processes live on: {left}"
        time.sleep(0.2)


@pytest.mark.timeout(300)
def test_a_short_storm_leaves_the_same_weights_and_no_process(cluster, recipe_of, uninterrupted):
    """The two slow tests in little: three kills, a freeze and three scales, from a fixed seed."""
    elastic = {"standbys": 1, "heartbeat_s": 1.0, "grow_timeout_s": 300.0, "max_failures": 50}
    seen: list[int] = []
    with running(recipe_of(steps=STEPS, workers=3, elastic=elastic), "short-storm") as run:
        acts = random_acts(
            run, np.random.default_rng(28), ["kill"] * 3 + ["freeze"] + ["scale"] * 3
        )
        acts[1] = lambda: seen.extend(living_workers())
        run.finish(at_steps(run, acts))
    assert len(seen) >= 3
    assert_as_if_nothing_happened(run, uninterrupted)
    assert run.causes().count("failure") >= 3
    assert "shrink" in run.causes()
    assert_same_weights(run, uninterrupted)
    assert_no_worker_is_left()


def one_after_another(run: Run, orders: Path, rng: np.random.Generator) -> None:
    """A death in every phase, three growths and three shrinkings, each seen through, in any order.

    The deaths strike random ranks; the pool has three to start with, and two to five after that.
    """
    walk = rng.permuted([[1, 1, 1, -1, -1, -1]] * 50, axis=1)
    sizes = next(path for path in 3 + np.cumsum(walk, axis=1) if path.min() > 1 and path.max() < 6)
    deaths, scales, target = iter(rng.permutation(PHASES)), iter(sizes.tolist()), 3
    for dies in rng.permutation([True] * 6 + [False] * 6):
        if dies:
            die(run, orders, str(next(deaths)), int(rng.integers(5)))
        else:
            has_workers(run, target)  # whoever died before is replaced
            target = next(scales)
            scale(run, target)()
            has_workers(run, target)


def has_workers(run: Run, num_workers: int) -> None:
    wait_until(lambda: run.status().get("num_workers") == num_workers)


def die(run: Run, orders: Path, phase: str, rank: int) -> None:
    """Let a worker die in a phase, and see the step done again.

    The next death is in another step: two in one step would make its sequences suspect.
    """
    failures = run.causes().count("failure")
    order(orders, phase, rank)
    if phase == "checkpoint":
        run.driver.save.remote()
    wait_until(lambda: run.causes().count("failure") > failures)
    assert not (orders / phase).exists()
    redone = len(run.steps())
    wait_until(lambda: len(run.steps()) > redone)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10))
def test_sixty_steps_with_twelve_changes_equal_the_undisturbed(cluster, recipe_of, tmp_path, seed):
    elastic = {"standbys": 1, "grow_timeout_s": 300.0, "max_failures": 50}
    recipe = recipe_of(steps=ENDLESS, workers=3, elastic=elastic, checkpoint={"every_steps": 7})
    factory = mortal_runtime(tmp_path, pace_s=1.0)
    with running(recipe, f"storm-{seed}", make_runtime=factory) as run:
        wait_until(run.steps)
        one_after_another(run, tmp_path, np.random.default_rng(seed))
        wait_until(lambda: len(run.steps()) >= 60)
        run.end_after_this_step()
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert run.causes().count("failure") >= 6
    assert run.causes().count("shrink") == 3
    assert run.causes().count("grow") >= 3  # replacements that came late among them
    assert_no_worker_is_left()
    with running(recipe_of(steps=len(steps)), f"calm-{seed}") as calm:
        calm.finish()
    assert run.ids() == calm.ids()
    np.testing.assert_allclose(run.losses(), calm.losses(), rtol=0, atol=LOSS_TOLERANCE)
    assert_same_weights(run, calm)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_changes_leave_every_sequence_once_and_leak_nothing(cluster, recipe_of):
    acts = ["kill"] * 90 + ["freeze"] * 10 + ["scale"] * 100
    steps = GAP * (len(acts) + 2)
    elastic = {
        "min": 2,  # the last worker's death would lose what no checkpoint has
        "standbys": 1,
        "heartbeat_s": 1.0,
        "grow_timeout_s": 300.0,
        "max_failures": 1000,
    }
    batch = {"global_batch_tokens": STORED_TOKENS, "token_budget": 4096}
    checkpoint = {"every_steps": 25}
    recipe = recipe_of(steps=steps, workers=3, elastic=elastic, checkpoint=checkpoint, **batch)
    free_bytes = free_object_store_bytes()
    sizes: list[dict[str, int]] = []
    stored: list[int] = []
    ends = (3, steps - 2)
    with running(recipe, "storm") as run:
        plan = random_acts(run, np.random.default_rng(0), acts)
        plan |= {step: lambda: sizes.append(footprint(run.status()["driver_pid"])) for step in ends}
        plan |= {steps // 2 + 1: lambda: stored.append(free_bytes - free_object_store_bytes())}
        run.finish(at_steps(run, plan))
    assert [step["step"] for step in run.steps()] == list(range(1, steps + 1))
    ids = [i for batch in run.ids() for i in batch]
    whole_epochs = len(ids) // 120 * 120
    counts = np.bincount(np.array(ids[:whole_epochs]) - 5000)
    assert set(counts.tolist()) == {whole_epochs // 120}
    assert run.causes().count("failure") >= 50  # of 100; others struck a pool that was re-forming
    first, last = sizes
    assert last["threads"] <= first["threads"] + 8
    assert last["files"] <= first["files"] + 16
    assert last["MiB"] <= first["MiB"] + 64
    assert 0 < stored[0] < 16 * STORED_TOKENS  # a payload or two
    assert_no_worker_is_left()
    wait_until(lambda: free_object_store_bytes() >= free_bytes)
