"""Checkpoints: every key once, read back by any pool, and damage is found."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.workers.pool import (
    GQA,
    Part,
    assembled,
    command_of,
    joined,
    parameter_parts,
    payload_of,
    plan_with,
    pool_shape,
    run_pool,
)
from workers import checkpoint
from workers.errors import CheckpointError, CheckpointMismatchError
from workers.protocol import ModelSpec, ShardInfo, TrainingSpec
from workers.runtime import WorkerRuntime

TRAINING = TrainingSpec(seed=3, dtype="float64", eps=1e-3, clip_grad=0.0)
LENGTHS = [[50, 7, 1, 90], [33, 2, 90], [16, 21, 90, 3], [60, 60, 5]]


def train(runtime: WorkerRuntime, steps: range, num_ranks: int) -> None:
    for step in steps:
        pool = pool_shape(num_ranks, 96, TRAINING)
        payload = payload_of(plan_with("hydra", LENGTHS[step - 1], pool), seed=step)
        assert runtime.run_step(command_of(payload.plan, step), payload).applied


def names_of(shards: tuple[ShardInfo, ...]) -> tuple[str, ...]:
    return tuple(sorted({shard.path.split("/")[0] for shard in shards}))


def save_and_go_on(
    rank: int, world_size: int, port: int, folder: str, training: TrainingSpec
) -> tuple[tuple[ShardInfo, ...], list[Part]]:
    """Two steps, a checkpoint that is written while step 3 runs, and step 4."""
    runtime = joined(rank, world_size, port, GQA, training)
    train(runtime, range(1, 3), world_size)
    runtime.start_save(folder)
    train(runtime, range(3, 4), world_size)
    shards = runtime.finish_save()
    train(runtime, range(4, 5), world_size)
    return shards, parameter_parts(runtime)


def load_and_go_on(
    rank: int, world_size: int, port: int, folder: str, shards: tuple[ShardInfo, ...]
) -> tuple[int, list[Part]]:
    runtime = joined(rank, world_size, port, GQA, TRAINING)
    runtime.verify_shards(folder, shards[rank::world_size])
    step = runtime.load_shards(folder, names_of(shards))
    train(runtime, range(3, 5), world_size)
    return step, parameter_parts(runtime)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """A checkpoint of three workers at step 2, its files, and the weights after step 4."""
    folder = tmp_path_factory.mktemp("checkpoint")
    results = run_pool(3, save_and_go_on, str(folder), TRAINING)
    shards = tuple(shard for written, _ in results for shard in written)
    return folder, shards, assembled(part for _, parts in results for part in parts)


def test_shards_name_every_file_and_all_workers_write(saved):
    folder, shards, _ = saved

    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert {shard.path for shard in shards} == files
    assert {shard.path.split("/")[0] for shard in shards} == {
        checkpoint.shard_name(1, rank) for rank in range(3)
    }
    checkpoint.verify(str(folder), shards)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_another_pool_goes_on_from_it(saved, num_ranks: int):
    folder, shards, expected = saved

    results = run_pool(num_ranks, load_and_go_on, str(folder), shards)

    assert [step for step, _ in results] == [2] * num_ranks
    found = assembled(part for _, parts in results for part in parts)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


def load_alone(
    rank: int, world_size: int, port: int, model: ModelSpec, folder: str, names: tuple[str, ...]
) -> str:
    runtime = joined(rank, world_size, port, model, TRAINING)
    before = runtime.fingerprint()
    with pytest.raises(CheckpointMismatchError) as caught:
        runtime.load_shards(folder, names)
    assert runtime.fingerprint() == before
    return str(caught.value)


@pytest.mark.parametrize(
    "model", [replace(GQA, num_layers=4), replace(GQA, ffn_hidden_size=256)], ids=["more", "wider"]
)
def test_another_model_is_refused(saved, model: ModelSpec):
    folder, shards, _ = saved

    (message,) = run_pool(1, load_alone, model, str(folder), names_of(shards))

    assert "Resume with the model" in message


def test_no_shard_at_all_is_refused(tmp_path: Path):
    run_pool(1, load_alone, GQA, str(tmp_path), ())


def test_damage_is_found(saved, tmp_path: Path):
    folder, shards, _ = saved
    victim = next(shard for shard in shards if shard.path.endswith(".distcp"))
    copy = tmp_path / victim.path
    copy.parent.mkdir(parents=True)
    data = bytearray((folder / victim.path).read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes(data)

    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.verify(str(tmp_path), [victim])
    copy.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.verify(str(tmp_path), [victim])
