"""Who is in the pool: nodes come and go, units go whole, jobs compete, and nothing piles up."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import ray

from tests.integration.conftest import ENDLESS, NUM_CPUS, Run, footprint, running
from tests.integration.mortal import mortal_runtime, order
from tests.integration.node import Node, wait_until
from tests.integration.test_elastic import LOSS_TOLERANCE, scale

DENSE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
}
MOE = DENSE | {"num_experts": 4, "expert_ffn_hidden_size": 32}
NODE_CPUS = 3


@pytest.fixture
def join_node(cluster: None, ray_folder: str) -> Iterator[Callable[[], Node]]:
    """Lets a node join the tests' cluster; it is gone after the test."""
    nodes: list[Node] = []

    def join() -> Node:
        address = ray.get_runtime_context().gcs_address
        nodes.append(Node(address, ray_folder, NODE_CPUS))
        return nodes[-1]

    yield join
    for node in nodes:
        node.end()
        node.wait()


def assert_same_training(run: Run, calm: Run) -> None:
    assert run.ids() == calm.ids()
    np.testing.assert_allclose(run.losses(), calm.losses(), rtol=0, atol=LOSS_TOLERANCE)


def nodes_of(run: Run) -> list[str]:
    return [worker["node"] for worker in run.status().get("workers", [])]


@pytest.mark.timeout(400)
def test_a_run_follows_its_cluster_and_leaves_a_drained_node_for_good(join_node, recipe_of):
    elastic = {"follow_cluster": True, "grow_timeout_s": 300.0, "max": 4}
    claims = {"workers": 2, "cpus_per_worker": NODE_CPUS}
    recipe = recipe_of(steps=ENDLESS, elastic=elastic, **claims)
    with running(recipe, "follows") as run:
        wait_until(run.steps)
        assert run.status()["num_workers"] == NUM_CPUS // NODE_CPUS == 2
        node = join_node()
        wait_until(lambda: node.node_id in nodes_of(run))
        assert run.status()["num_workers"] == 3

        leaving = ray.get(run.driver.drain.remote(node.node_id), timeout=60)
        wait_until(lambda: run.status()["num_workers"] == 2)
        assert len(leaving) == 1
        assert node.node_id not in nodes_of(run)

        other = join_node()  # the drained node has room too, and must not be used again
        wait_until(lambda: run.status()["num_workers"] == 3)
        assert other.node_id in nodes_of(run)
        assert "on a node that is drained" not in run.directory.log.read_text()  # not even tried
        other.end()
        wait_until(lambda: run.status()["num_workers"] == 2 and run.status()["state"] == "running")
        run.end_after_this_step()
    assert {"grow", "shrink", "failure"} <= set(run.causes())
    assert [step["step"] for step in run.steps()] == list(range(1, len(run.steps()) + 1))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("axes", "model"),
    [
        ({"pipeline": 2}, DENSE),
        pytest.param({"tensor": 2}, DENSE, marks=pytest.mark.slow),
        pytest.param({"expert": 2}, MOE, marks=pytest.mark.slow),
    ],
    ids=["pipeline", "tensor", "expert"],
)
def test_a_scale_unit_comes_and_goes_as_one(cluster, recipe_of, tmp_path, axes, model):
    """A unit dies with one of its workers; its state comes from its peers in the others."""
    settings = {"parallel": axes, "model": model, "token_budget": 512}
    name = next(iter(axes))
    elastic = {"standbys": 2, "grow_timeout_s": 300.0}
    factory = mortal_runtime(tmp_path, pace_s=0.7)
    recipe = recipe_of(steps=ENDLESS, workers=4, elastic=elastic, **settings)
    with running(recipe, f"units-{name}", make_runtime=factory) as run:
        wait_until(run.steps)
        before = {worker["pid"] for worker in run.status()["workers"]}
        order(tmp_path, "backward", rank=1)
        wait_until(lambda: "failure" in run.causes())
        after = {worker["pid"] for worker in run.status()["workers"]}
        assert len(before & after) == 2  # the unit's other worker went too
        wait_until(lambda: run.status()["num_workers"] == 4)
        scale(run, 2)()
        wait_until(lambda: run.status()["num_workers"] == 2)
        scale(run, 4)()
        wait_until(lambda: run.status()["num_workers"] == 4)
        run.end_after_this_step()
    assert run.events("restored") == []  # nothing came from a checkpoint
    calm_recipe = recipe_of(steps=len(run.steps()), workers=4, **settings)
    with running(calm_recipe, f"calm-{name}") as calm:
        calm.finish()
    assert_same_training(run, calm)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_jobs_that_grow_at_once_both_end(cluster, recipe_of, uninterrupted, tmp_path):
    """Each wants six of the cluster's eight places, so at most one can have them."""
    elastic = {"grow_timeout_s": 60.0}
    recipe = recipe_of(steps=40, elastic=elastic)
    factory = mortal_runtime(tmp_path, pace_s=3.0)
    with (
        running(recipe, "first", make_runtime=factory) as first,
        running(recipe, "second", make_runtime=factory) as second,
    ):
        runs = (first, second)
        wait_until(lambda: all(run.steps() for run in runs))
        for run in runs:
            scale(run, 6)()
        wait_until(lambda: any(run.events("growth_failed") for run in runs))
        for run in runs:
            run.finish()
    for run in runs:
        assert_same_training(run, uninterrupted)
        assert {step["num_ranks"] for step in run.steps()} <= {2, 6}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_resizes_in_a_row_leave_nothing_behind(cluster, recipe_of, tmp_path, count):
    """Sizes of 2, 3, 4 and 3 workers in turn; the oldest worker and the driver stay throughout."""
    elastic = {"standbys": 1, "grow_timeout_s": 300.0}
    factory = mortal_runtime(tmp_path, pace_s=0.4)
    seen: list[tuple[dict[str, int], dict[str, int]]] = []
    recipe = recipe_of(steps=ENDLESS, elastic=elastic)
    with running(recipe, f"resizes-{count}", make_runtime=factory) as run:
        wait_until(run.steps)
        for i in range(count):
            num_workers = (3, 4, 3, 2)[i % 4]
            scale(run, num_workers)()
            wait_until(lambda n=num_workers: run.status()["num_workers"] == n)
            if i % 4 == 3:
                status = run.status()
                oldest = min(status["workers"], key=lambda worker: worker["worker"])
                seen.append((footprint(status["driver_pid"]), footprint(oldest["pid"])))
        run.end_after_this_step()
    with running(recipe_of(steps=len(run.steps())), f"calm-{count}") as calm:
        calm.finish()
    assert_same_training(run, calm)
    assert len(run.events("generation")) >= count
    for first, last in zip(seen[0], seen[-1], strict=True):
        assert last["threads"] <= first["threads"] + 2
        assert last["files"] <= first["files"] + 4
        assert last["MiB"] <= first["MiB"] + 32
