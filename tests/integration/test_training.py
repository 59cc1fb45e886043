"""The main job on real Ray actors: it learns, resumes, and does not care how it was planned."""

import math

import numpy as np
import pytest
import ray

from hydra_ray.driver.errors import NonFiniteLossError
from hydra_ray.driver.states import RunState
from tests.integration.conftest import Run, running


def test_a_run_learns_and_writes_down_every_step(uninterrupted: Run):
    steps = uninterrupted.steps()
    assert [step["step"] for step in steps] == list(range(1, 41))
    assert steps[0]["loss"] == pytest.approx(math.log(257), rel=0.1)
    assert np.mean(uninterrupted.losses()[-5:]) < 0.8 * steps[0]["loss"]
    degrees = {degree for step in steps for degree in step["degrees"]}
    assert degrees == {"1", "2"}
    for step in steps:
        assert step["num_sequences"] == len(step["sequence_ids"]) == sum(step["degrees"].values())
        assert step["load_max_over_mean"] >= 1.0
        assert step["tokens_per_s"] > 0
    assert uninterrupted.directory.endpoint() is None
    assert [e["state"] for e in uninterrupted.events("state")][-1] == RunState.FINISHED


def test_every_sequence_comes_once_an_epoch(uninterrupted: Run, corpus):
    ids = [i for batch in uninterrupted.ids() for i in batch]
    first_epoch = ids[:120]
    assert sorted(first_epoch) == list(range(5000, 5120))


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(cluster, recipe_of, uninterrupted):
    with running(recipe_of(steps=20), "resumed") as first:
        assert first.finish()["state"] == "finished"
    with running(recipe_of(steps=40), "resumed") as second:
        result = second.finish()
    assert second.ids() == uninterrupted.ids()
    np.testing.assert_allclose(second.losses(), uninterrupted.losses(), rtol=0, atol=1e-6)
    assert result["steps"] == 40
    assert second.events("restored")[-1]["step"] == 20


def test_static_and_hydra_compute_the_same(cluster, recipe_of, uninterrupted):
    with running(recipe_of(steps=40, planner="static"), "static") as run:
        run.finish()
    assert run.ids() == uninterrupted.ids()
    assert all(len(step["degrees"]) == 1 for step in run.steps())
    np.testing.assert_allclose(run.losses(), uninterrupted.losses(), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_static_and_hydra_compute_the_same_for_100_steps(cluster, recipe_of):
    losses = []
    for planner in ("hydra", "static"):
        recipe = recipe_of(steps=100, planner=planner, workers=4)
        with running(recipe, f"long-{planner}") as run:
            run.finish()
        losses.append(run.losses())
    assert len(losses[0]) == 100
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-3)


def test_a_nonfinite_loss_stops_the_run_and_names_the_sequences(cluster, recipe_of):
    optimizer = {"lr": 1e30, "clip_grad": 0.0, "name": "sgd"}
    with (
        running(recipe_of(workers=1, token_budget=512, optimizer=optimizer), "nan") as run,
        pytest.raises(NonFiniteLossError, match=r"step \d+ is not finite") as caught,
    ):
        run.finish()
    refused = len(run.steps()) + 1
    assert f"step {refused} " in str(caught.value)
    assert caught.value.exit_code == 2
    last = run.events("state")[-1]
    assert last["state"] == "failed"
    assert last["kind"] == "NonFiniteLossError"


def test_the_driver_answers_while_it_trains(cluster, recipe_of):
    with running(recipe_of(steps=10_000, workers=1, token_budget=512), "asked") as run:
        lines, _ = ray.get(run.driver.follow.remote(0, 60), timeout=90)
        while not any(line.kind == "step" for line in lines):
            lines, _ = ray.get(run.driver.follow.remote(lines[-1].number, 60), timeout=90)
        status = ray.get(run.driver.status.remote(), timeout=30)
        assert status["state"] == "running"
        assert status["num_workers"] == status["target_workers"] == 1
        assert status["last_step"]["step"] >= 1
        ray.get(run.driver.save.remote(), timeout=30)
        ray.get(run.driver.stop.remote(), timeout=30)
        assert run.finish()["state"] == "stopped"
    assert run.events("checkpoint")
