"""Checkpoints in a folder and on an S3 server: written, damaged, kept, read back.

The driver's part and torch's shards are the real ones; only the workers are a few tensors each.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_ray.data.batches import DataCursor
from hydra_ray.driver.calls import Answers
from hydra_ray.driver.checkpoints import MANIFEST, Checkpoints, Manifest
from hydra_ray.driver.errors import CheckpointError
from hydra_ray.driver.generation import WorkersLostError
from hydra_ray.driver.journal import Journal
from hydra_ray.driver.saving import MOST_FAILURES, Saving, restore_newest
from hydra_ray.rundir import RunDirectory
from workers import checkpoint
from workers.errors import CheckpointMismatchError
from workers.protocol import ShardInfo
from workers.state import TrainState
from workers.storage import open_storage

KEYS = [f"weight/{i}" for i in range(7)]


def state_at(step: int) -> TrainState:
    tensors = {key: torch.full((3, 1000), float(step + i)) for i, key in enumerate(KEYS)}
    return TrainState(step=step, tensors=tensors)


class TensorCrew:
    """Workers that hold a few tensors and write every nth key, as replicas do."""

    def __init__(self, num_workers: int) -> None:
        self.workers = range(num_workers)
        self.states = [TrainState(step=0, tensors={}) for _ in self.workers]
        self.wanted = state_at(0).tensors
        self.lost: dict[str, int] = {}  # method -> the worker that is lost in it
        self._writers = [checkpoint.ShardWriter() for _ in self.workers]

    def call(
        self,
        workers: Sequence[int],
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        *,
        timeout_s: float,
    ) -> Answers:
        lost = self.lost.pop(method, None)
        results = {w: getattr(self, method)(w, *arguments(w)) for w in workers if w != lost}
        return Answers(results=results, lost={} if lost is None else {lost: "killed by the test"})

    def start_save(self, worker: int, folder: str) -> None:
        owned = KEYS[worker :: len(self.workers)]
        path = f"{folder}/{checkpoint.shard_name(1, worker)}"
        self._writers[worker].start(self.states[worker], owned, path)

    def finish_save(self, worker: int) -> tuple[ShardInfo, ...]:
        return self._writers[worker].finish(60)

    def verify_shards(self, worker: int, folder: str, shards: tuple[ShardInfo, ...]) -> None:
        checkpoint.verify(folder, shards)

    def load_shards(self, worker: int, folder: str, names: tuple[str, ...]) -> int:
        self.states[worker] = checkpoint.read(folder, names, dict(self.wanted))
        return self.states[worker].step


class Bench:
    """A run's checkpoints, and what was told of them."""

    def __init__(self, path: str, root: Path) -> None:
        self.directory = RunDirectory(root)
        self.directory.create("")
        self.journal = Journal(self.directory)
        self.checkpoints = Checkpoints(path)

    def save(self, crew: TensorCrew, *steps: int, keep: int = 9) -> Saving:
        saving = Saving(self.checkpoints, crew, self.journal, keep=keep, timeout_s=60)
        for step in steps:
            crew.states = [state_at(step) for _ in crew.workers]
            saving.start(crew.workers, manifest(step))
            crew.states = [state_at(step + 1) for _ in crew.workers]  # training goes on
        saving.settle(wait=True)
        return saving

    def restore(self, crew: TensorCrew) -> Manifest | None:
        return restore_newest(self.checkpoints, crew, crew.workers, self.journal, timeout_s=60)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.directory.events() if event["event"] == name]


def manifest(step: int) -> Manifest:
    return Manifest(
        step=step,
        cursor=DataCursor(epoch=0, position=10 * step),
        seed=1,
        num_ranks=3,
        corpus="corpus",
        config={},
        shards=(),
    )


@pytest.fixture(params=["folder", "s3"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, object_store: str) -> Bench:
    path = str(tmp_path) if request.param == "folder" else f"{object_store}/{tmp_path.name}"
    return Bench(f"{path}/checkpoints", tmp_path / "run")


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_any_number_of_workers_reads_what_three_wrote(bench: Bench, num_workers: int):
    bench.save(TensorCrew(3), 5, 10)
    crew = TensorCrew(num_workers)
    found = bench.restore(crew)
    assert found is not None
    assert (found.step, found.cursor.position) == (10, 100)
    assert len({shard.path.split("/")[0] for shard in found.shards}) == 3
    for state in crew.states:
        assert state.step == 10
        assert all(torch.equal(state.tensors[key], state_at(10).tensors[key]) for key in KEYS)
    told = bench.events("checkpoint")
    assert [event["step"] for event in told] == [5, 10]
    assert all(0 <= event["pause_s"] <= event["took_s"] for event in told)


def test_as_many_as_asked_for_are_kept(bench: Bench):
    bench.save(TensorCrew(2), 5, 10, 15, 20, keep=2)
    assert bench.checkpoints.steps() == [15, 20]
    files, root = open_storage(bench.checkpoints.path)
    assert {path.split("/step_")[1][:6] for path in files.find(root)} == {"000015", "000020"}


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def damage(checkpoints: Checkpoints, step: int, kind: str) -> None:
    files, folder = open_storage(checkpoints.folder(step))
    shard = next(s.path for s in checkpoints.read(step).shards if s.path.endswith(".distcp"))
    change = {"cut": cut, "flip": flip, "drop": None}[kind.split(maxsplit=1)[0]]
    path = f"{folder}/{MANIFEST if kind.endswith('manifest') else shard}"
    if change is None:
        files.rm_file(path)
    else:
        files.pipe_file(path, change(files.cat_file(path)))


@pytest.mark.parametrize("kind", ["cut shard", "drop shard", "flip shard", "cut manifest"])
def test_a_damaged_newest_falls_back_loudly(bench: Bench, kind: str, caplog):
    bench.save(TensorCrew(3), 5, 10)
    damage(bench.checkpoints, 10, kind)
    crew = TensorCrew(2)
    with caplog.at_level(logging.WARNING):
        found = bench.restore(crew)
    assert found is not None
    assert found.step == 5
    assert [state.step for state in crew.states] == [5, 5]
    assert [event["step"] for event in bench.events("checkpoint_damaged")] == [10]
    assert "checkpoint of step 10 is damaged" in caplog.text


def test_with_every_checkpoint_damaged_nothing_is_trained_from_scratch(bench: Bench):
    bench.save(TensorCrew(2), 5, 10)
    damage(bench.checkpoints, 5, "flip shard")
    damage(bench.checkpoints, 10, "flip manifest")
    with pytest.raises(CheckpointError, match="no checkpoint of the run can be read"):
        bench.restore(TensorCrew(2))
    assert len(bench.events("checkpoint_damaged")) == 2


def test_after_falling_back_new_checkpoints_are_not_taken_for_old_ones(bench: Bench):
    bench.save(TensorCrew(2), 5, 10, 15)
    damage(bench.checkpoints, 15, "cut manifest")
    assert bench.restore(TensorCrew(2)).step == 10
    bench.save(TensorCrew(2), 11, keep=2)
    assert bench.checkpoints.steps() == [10, 11, 15]
    assert bench.restore(TensorCrew(2)).step == 11


@pytest.mark.parametrize("method", ["start_save", "finish_save"])
def test_a_worker_lost_in_a_save_leaves_no_checkpoint_and_its_rest_goes(bench: Bench, method: str):
    crew = TensorCrew(3)
    bench.save(crew, 5)
    crew.lost = {method: 1}
    if method == "start_save":
        with pytest.raises(WorkersLostError):
            bench.save(crew, 10)
    else:
        assert bench.save(crew, 10).abandoned_step == 10
        assert [event["step"] for event in bench.events("checkpoint_abandoned")] == [10]
    assert bench.checkpoints.steps() == [5]
    bench.save(crew, 15)
    assert bench.checkpoints.steps() == [5, 15]
    files, root = open_storage(bench.checkpoints.path)
    assert not [path for path in files.find(root) if "step_000010" in path]


def test_another_layout_is_refused_rather_than_taken_for_damage(bench: Bench):
    bench.save(TensorCrew(2), 5)
    crew = TensorCrew(1)
    crew.wanted = {f"{key}#0.2": tensor for key, tensor in state_at(0).tensors.items()}
    with pytest.raises(CheckpointMismatchError, match="7 of 7 tensors missing"):
        bench.restore(crew)
    assert bench.events("checkpoint_damaged") == []


def test_storage_that_cannot_be_written_is_tried_again_and_then_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    bench = Bench(str(tmp_path / "file"), tmp_path / "run")
    crew = TensorCrew(2)
    with pytest.raises(CheckpointError, match=f"limit {MOST_FAILURES} attempts"):
        bench.save(crew, *range(1, 9))
    assert [event["step"] for event in bench.events("checkpoint_abandoned")] == [1, 2, 3]


class UnreachableError(Exception):
    """What a client library raises that knows nothing of OSError."""


def unreachable(*_: Any, **__: Any) -> None:
    raise UnreachableError("no such endpoint")


@pytest.fixture
def in_memory(tmp_path: Path) -> Bench:
    return Bench(f"memory://{tmp_path}/checkpoints", tmp_path / "run")


@pytest.mark.parametrize("method", ["makedirs", "pipe_file", "open"])
def test_any_error_of_the_storage_is_a_failed_attempt(
    in_memory: Bench, monkeypatch: pytest.MonkeyPatch, method: str
):
    files, _ = open_storage(in_memory.checkpoints.path)
    crew = TensorCrew(2)
    with monkeypatch.context() as patch:
        patch.setattr(type(files), method, unreachable)
        assert in_memory.save(crew, 5).abandoned_step == 5
    told = in_memory.events("checkpoint_abandoned")
    assert [event["step"] for event in told] == [5]
    assert "UnreachableError: no such endpoint" in told[0]["cause"]
    assert in_memory.save(crew, 10).abandoned_step is None
    assert in_memory.checkpoints.steps() == [10]


@pytest.mark.parametrize("method", ["ls", "exists", "cat_file"])
def test_any_error_of_reading_is_a_checkpoint_error(
    in_memory: Bench, monkeypatch: pytest.MonkeyPatch, method: str
):
    in_memory.save(TensorCrew(2), 5)
    files, _ = open_storage(in_memory.checkpoints.path)
    monkeypatch.setattr(type(files), method, unreachable)
    with pytest.raises(CheckpointError):
        in_memory.restore(TensorCrew(2))


def test_a_checkpoint_is_valid_where_none_may_be_removed(
    in_memory: Bench, monkeypatch: pytest.MonkeyPatch
):
    files, _ = open_storage(in_memory.checkpoints.path)
    monkeypatch.setattr(type(files), "rm_file", unreachable)
    in_memory.save(TensorCrew(2), 5, 10, 15, keep=1)
    assert in_memory.checkpoints.steps() == [5, 10, 15]
    assert [event["step"] for event in in_memory.events("checkpoint")] == [5, 10, 15]
    assert in_memory.events("checkpoint_abandoned") == []
    assert [event["step"] for event in in_memory.events("checkpoints_not_removed")] == [10, 15]
    assert in_memory.restore(TensorCrew(1)).step == 15
