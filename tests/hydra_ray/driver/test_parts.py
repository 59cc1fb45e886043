"""The driver's small parts: placement, requests, journal, checkpoints, run directory, routing."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hydra_ray.config import load_recipe
from hydra_ray.data.batches import DataCursor, GlobalBatches
from hydra_ray.driver import capacity
from hydra_ray.driver.actor import Driver, Order, summary
from hydra_ray.driver.capacity import workers_that_fit
from hydra_ray.driver.checkpoints import Checkpoints, Manifest
from hydra_ray.driver.errors import CheckpointError
from hydra_ray.driver.journal import Journal
from hydra_ray.driver.placement import UnitShape, rank_order
from hydra_ray.driver.requests import Requests
from hydra_ray.driver.states import RunState
from hydra_ray.routing import route
from hydra_ray.rundir import (
    Endpoint,
    RunDirectory,
    check_name_is_free,
    find_runs,
    read_lines,
    run_directory,
)
from planner.errors import InputError, PlanError
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.registry import get_planner
from workers.protocol import ShardInfo


def test_ranks_run_tensor_fastest_then_hdp_then_pipeline():
    shape = UnitShape(tensor=2, pipeline=2, expert=1)
    units = [(0, 1, 2, 3), (8, 9, 10, 11)]  # tp0 tp1 of stage 0, then of stage 1
    assert rank_order(units, shape) == (0, 1, 8, 9, 2, 3, 10, 11)
    assert rank_order([(4,), (7,)], UnitShape()) == (4, 7)
    experts = UnitShape(expert=2)
    assert rank_order([(0, 1), (2, 3)], experts) == (0, 1, 2, 3)


def test_requests_keep_the_last_wish_and_wake_the_waiting():
    requests = Requests(4)
    first, second = requests.scale(6), requests.scale(3)
    requests.withdraw_growth(first, 4)
    assert requests.wishes().target_units == 3
    requests.withdraw_growth(second, 4)
    assert requests.wishes().target_units == 4
    woken = threading.Event()
    waiting = threading.Thread(target=lambda: (requests.wait(30), woken.set()))
    waiting.start()
    while not woken.is_set():
        requests.stop()
        waiting.join(0.01)
    assert requests.wishes().stop


def test_a_follower_sees_every_line_once_and_the_end(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("")
    journal, seen = Journal(directory), []

    def follow():
        after, state = 0, None
        while state != RunState.FINISHED:
            lines, state = journal.follow(after, 30)
            seen.extend(lines)
            after = lines[-1].number if lines else after

    follower = threading.Thread(target=follow)
    follower.start()
    journal.enter(RunState.RUNNING)
    for step in range(1, 4):
        journal.step({"step": step, "sequence_ids": [step]})
    journal.enter(RunState.FINISHED)
    follower.join(30)
    assert not follower.is_alive()
    assert [line.number for line in seen] == list(range(1, 6))
    assert [line.record["step"] for line in seen if line.kind == "step"] == [1, 2, 3]
    assert [step["sequence_ids"] for step in directory.steps()] == [[1], [2], [3]]
    assert journal.status()["state"] == "finished"


def manifest(step, shards=()):
    return Manifest(
        step=step,
        cursor=DataCursor(epoch=1, position=5),
        seed=3,
        num_ranks=4,
        corpus="f",
        config={"steps": 9},
        shards=shards,
    )


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_checkpoint_is_valid_once_its_manifest_is_there(tmp_path, scheme):
    checkpoints = Checkpoints(f"{scheme}{tmp_path}/checkpoints")
    assert checkpoints.steps() == []
    for step in (5, 10, 15):
        checkpoints.prepare(step)
        checkpoints.commit(manifest(step))
    checkpoints.prepare(20)
    assert checkpoints.steps() == [5, 10, 15]
    assert checkpoints.read(15) == manifest(15)
    assert checkpoints.retain(2, newest=15) == [5]
    assert checkpoints.steps() == [10, 15]
    checkpoints.prepare(12)  # an attempt that was given up
    assert checkpoints.retain(1, newest=15) == [10, 12]
    assert checkpoints.retain(1, newest=5) == []
    assert checkpoints.steps() == [15]


def test_a_url_of_no_known_file_system_is_refused():
    with pytest.raises(InputError, match=r"got nosuch://bucket/run; .*extra s3"):
        Checkpoints("nosuch://bucket/run")


def test_a_missing_or_short_shard_is_found(tmp_path):
    checkpoints = Checkpoints(str(tmp_path))
    shard = ShardInfo(path="shard_00000/a.bin", num_bytes=4, blake2b="")
    checkpoints.prepare(5)
    checkpoints.commit(manifest(5, (shard,)))
    with pytest.raises(CheckpointError, match=r"missing or cut short; got .* None bytes"):
        checkpoints.read(5)
    file = tmp_path / "step_000005" / shard.path
    file.parent.mkdir()
    file.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"cut short; got .* 3 bytes; limit 4 bytes"):
        checkpoints.read(5)
    file.write_bytes(b"abcd")
    assert checkpoints.read(5).shards == (shard,)


def test_lines_after_a_step_are_cut_and_half_a_line_is_dropped(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("name: run")
    for step in range(1, 6):
        directory.append_step({"step": step})
    with (directory.root / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert directory.cut_steps(3) == 2
    directory.append_step({"step": 4})
    assert [record["step"] for record in directory.steps()] == [1, 2, 3, 4]
    assert list(read_lines(tmp_path / "absent")) == []


def test_a_run_s_name_is_taken_once_and_resumed_only_if_it_is(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    check_name_is_free(directory, resume=False)
    with pytest.raises(InputError, match="no such run to resume"):
        check_name_is_free(directory, resume=True)
    directory.create("name: run")
    with pytest.raises(InputError, match=r"a run of this name exists.*--resume"):
        check_name_is_free(directory, resume=False)
    check_name_is_free(directory, resume=True)
    assert [found.root for found in find_runs(str(tmp_path))] == [directory.root]


def test_a_run_s_speed_counts_its_pauses(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("")
    assert summary(directory, "run", {"state": "stopped"})["tokens_per_s"] is None
    for step, time in ((1, 102.0), (2, 104.0), (3, 120.0)):
        directory.append_step(
            {"step": step, "time": time, "wall_s": 2.0, "tokens": 100, "loss": 1.0}
        )
    assert summary(directory, "run", {"state": "finished"})["tokens_per_s"] == 300 / 20


def test_an_endpoint_is_there_while_the_run_lives(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.create("")
    assert directory.endpoint() is None
    endpoint = Endpoint(run="run", ray_address="host:1", dashboard_url="", local_pid=7)
    directory.write_endpoint(endpoint)
    assert directory.endpoint() == endpoint
    directory.clear_endpoint()
    assert directory.endpoint() is None


def test_routing_sends_the_batch_as_it_is_and_refuses_another_batch_s_plan(bench):
    batches = GlobalBatches(bench.index, seed=1, batch_tokens=100)
    first = batches.next(DataCursor())
    second = batches.next(first.cursor_after)
    pool = PoolShape(num_ranks=3, token_budget=64)
    plan = get_planner("hydra").plan(first.lengths, pool, DENSE)
    command, payload = route(first, plan, step=4, generation=2)
    assert (command.step, command.generation) == (4, 2)
    assert command.plan_digest == payload.plan.digest()
    assert np.shares_memory(payload.tokens, first.tokens)
    assert np.array_equal(payload.sequence_ids, first.sequence_ids)
    with pytest.raises(PlanError, match="another batch"):
        route(second, plan, step=4, generation=2)


def test_manifests_survive_json_and_no_change():
    shard = ShardInfo(path="a", num_bytes=1, blake2b="b")
    whole = manifest(5, (shard,))
    text = whole.to_json()
    assert Manifest.from_json(text) == whole
    with pytest.raises(ValueError, match="another checksum"):
        Manifest.from_json(text.replace('"position": 5', '"position": 7'))
    with pytest.raises(json.JSONDecodeError):
        Manifest.from_json(text[: len(text) // 2])
    other = json.loads(whole.to_json()) | {"format": 99}
    with pytest.raises(ValueError, match="another format"):
        Manifest.from_json(json.dumps(other))
    assert replace(whole, step=6) != whole


def test_each_worker_fits_whole_on_one_node():
    nodes = [{"CPU": 3.0, "GPU": 2.0}, {"CPU": 8.0}, {"CPU": 1.9, "GPU": 8.0}]
    assert workers_that_fit(nodes, 1.0, 0.0) == 3 + 8 + 1
    assert workers_that_fit(nodes, 2.0, 0.0) == 1 + 4 + 0
    assert workers_that_fit(nodes, 0.5, 1.0) == 2 + 0 + 3
    assert workers_that_fit(nodes, 0.0, 0.0) == 0


class Cluster:
    """What a CapacityWatch looks at, and whom it asks."""

    def __init__(self, room: int, target: int) -> None:
        self.room, self.target, self.operation = room, target, 0
        self.asked: list[int] = []

    def scale(self, num_workers: int) -> int:
        self.asked.append(num_workers)
        self.target, self.operation = num_workers, self.operation + 1
        return self.operation

    def watch(self) -> capacity.CapacityWatch:
        return capacity.CapacityWatch(
            lambda: self.room, lambda: (self.target, self.operation), self.scale
        )


def test_the_cluster_s_room_is_asked_for_once_a_change():
    cluster = Cluster(room=4, target=4)
    watch = cluster.watch()
    for now_s, room in enumerate([4, 4, 6, 6, 5]):
        cluster.room = room
        watch.look(float(now_s))
    assert cluster.asked == [4, 6, 5]


def test_room_that_was_in_use_is_asked_for_again_unless_somebody_else_asked():
    cluster = Cluster(room=6, target=4)
    watch = cluster.watch()
    watch.look(0.0)
    cluster.target = 4  # given up
    watch.look(299.0)
    assert cluster.asked == [6]
    watch.look(300.0)
    assert cluster.asked == [6, 6]
    cluster.scale(3)  # a user
    watch.look(1000.0)
    assert cluster.asked == [6, 6, 3]


def test_the_watch_outlives_a_control_store_that_is_away_for_a_while(monkeypatch):
    monkeypatch.setattr(capacity, "LOOK_EVERY_S", 0.001)
    rooms, asked = iter([4, None, 6]), threading.Event()

    def room():
        value = next(rooms, 6)
        if value is None:
            raise RuntimeError("no answer")
        return value

    def scale(num_workers):
        if num_workers == 6:
            asked.set()
        return num_workers

    watch = capacity.CapacityWatch(room, lambda: (4, 0), scale)
    watch.start()
    assert asked.wait(30)
    watch.close()
    watch.join(30)


def test_a_followed_cluster_that_is_too_small_is_told_as_an_event(tmp_path):
    recipe = load_recipe(Path(__file__).parents[3] / "jobs" / "quickstart.yaml")
    directory = RunDirectory(tmp_path / "run")
    directory.create("")
    driver = Driver(Order(run="run", recipe=recipe, directory=directory))
    driver._tell_shortage({"CPU": 2.0})
    driver._tell_shortage({"CPU": 1.5})
    (told,) = [e for e in directory.events() if e["event"] == "cluster_small"]
    assert told["limit"] == "1.5 CPU cores, which is 3 workers on this cluster"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-x", "a" * 65, "x\n"])
def test_what_is_no_name_of_a_run_never_becomes_a_folder(tmp_path, name):
    with pytest.raises(InputError, match="no name of a run"):
        run_directory(str(tmp_path), name)


def test_a_run_that_a_living_process_trains_is_not_resumed(tmp_path):
    directory = run_directory(str(tmp_path), "mine")
    directory.create("")
    for pid, is_refused in ((os.getppid(), True), (os.getpid(), False), (2**22 + 1, False)):
        endpoint = Endpoint(run="mine", ray_address="", dashboard_url="", local_pid=pid)
        directory.write_endpoint(endpoint)
        if is_refused:
            with pytest.raises(InputError, match="still running"):
                check_name_is_free(directory, resume=True)
        else:
            check_name_is_free(directory, resume=True)
