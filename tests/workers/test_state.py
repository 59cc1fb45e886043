"""Train state moves between pools bit by bit, whatever the axes it is split over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.workers.layouts import POOL_OF_4, plan_of
from tests.workers.pool import (
    GQA,
    command_of,
    joined,
    membership_of,
    payload_of,
    plan_with,
    pool_shape,
    run_pool,
)
from workers.errors import CheckpointMismatchError
from workers.groups import place_of
from workers.protocol import ModelSpec, TrainingSpec
from workers.runtime import WorkerRuntime
from workers.state import TrainState

Tensors = dict[str, np.ndarray]

TRAINING = TrainingSpec(seed=3)
MOE = replace(GQA, num_experts=4, expert_ffn_hidden_size=64, aux_loss_coeff=1e-2)
MLA = replace(
    GQA,
    num_layers=4,
    attention="mla",
    output_gate=True,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_rope_dim=8,
    v_head_dim=16,
)
CASES = {
    "bfloat16": (GQA, replace(TRAINING, dtype="bfloat16")),
    "sharded": (GQA, replace(TRAINING, distributed_optimizer=True)),
    "experts": (MOE, replace(TRAINING, expert=2)),
    "experts, sharded, bfloat16": (
        MOE,
        replace(TRAINING, expert=2, distributed_optimizer=True, dtype="bfloat16"),
    ),
    "tensor": (GQA, replace(TRAINING, tensor=2, sequence_parallel=True)),
    "pipeline": (MLA, replace(TRAINING, pipeline=2, chunks=2)),
}


def tensors_of(runtime: WorkerRuntime) -> Tensors:
    state = runtime._captured()
    return {key: tensor.detach().clone().numpy() for key, tensor in state.tensors.items()}


def train_one(runtime: WorkerRuntime, training: TrainingSpec) -> None:
    payload = payload_of(plan_of(POOL_OF_4, pool_shape(4, 128, training)))
    assert runtime.run_step(command_of(payload.plan), payload).applied


def shrink(
    rank: int, world_size: int, port: int, model: ModelSpec, training: TrainingSpec, folder: str
) -> tuple[Tensors, Tensors, Tensors]:
    """A step on four HDP ranks, then two of them go on, and then read a checkpoint back."""
    runtime = joined(rank, world_size, port, model, training)
    train_one(runtime, training)
    runtime.save_shard(folder)
    dist.barrier()  # all shards are there
    names = tuple(sorted(path.name for path in Path(folder).iterdir()))
    before = tensors_of(runtime)
    runtime.leave()
    place = place_of(rank, num_ranks=4, tensor=training.tensor)
    if place.hdp >= 2:
        return before, {}, {}
    smaller = (place.stage * 2 + place.hdp) * training.tensor + place.tensor
    membership = membership_of(smaller, world_size // 2, port, training, generation=2)
    assert runtime.join(membership, pool_shape(2, 128, training)) == 1
    kept = tensors_of(runtime)
    assert runtime.load_shards(folder, names) == 1
    return before, kept, tensors_of(runtime)


def union(parts: list[Tensors]) -> Tensors:
    """All keys; processes that hold the same key must hold the same bits."""
    whole: Tensors = {}
    for key, tensor in (item for part in parts for item in part.items()):
        np.testing.assert_array_equal(whole.setdefault(key, tensor), tensor, err_msg=key)
    return whole


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        np.testing.assert_array_equal(found[key], tensor, err_msg=key)


@pytest.mark.parametrize("case", CASES)
def test_state_is_kept_and_read_back_bit_by_bit(case: str, tmp_path: Path):
    model, training = CASES[case]

    results = run_pool(
        4 * training.tensor * training.pipeline, shrink, model, training, str(tmp_path)
    )

    before, kept, read = (union([result[i] for result in results]) for i in range(3))
    assert_same(kept, before)
    assert_same(read, before)


def moved(
    rank: int,
    world_size: int,
    port: int,
    training: TrainingSpec,
    size: int,
    places: tuple[int, ...],
) -> tuple[Tensors, int, int, Tensors]:
    """A step on the first `size` workers; then all join, worker i at `places[i]`, and sync."""
    runtime = WorkerRuntime(MOE, training)
    runtime.load()
    before: Tensors = {}
    if rank < size:
        pool = pool_shape(size, 256, training)
        runtime.join(membership_of(rank, size, port, training), pool)
        payload = payload_of(plan_with("hydra", [50, 7, 90, 33], pool))
        assert runtime.run_step(command_of(payload.plan), payload).applied
        before = tensors_of(runtime)
        runtime.leave()
    place = membership_of(places[rank], world_size, port, training, generation=2)
    held = runtime.join(place, pool_shape(world_size, 256, training))
    return before, held, runtime.sync_state(), tensors_of(runtime)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("expert", "size", "places", "held"),
    [
        (1, 2, (0, 1, 2), [1, 1, 0]),
        (2, 2, (0, 1, 2, 3), [1, 1, 0, 0]),
        (2, 4, (0, 1, 3, 2), [1, 1, 0, 0]),
    ],
    ids=["newcomer", "new experts", "swapped experts"],
)
def test_a_sharded_optimizer_is_whole_again_in_any_pool(dtype, expert, size, places, held):
    training = replace(TRAINING, distributed_optimizer=True, dtype=dtype, expert=expert)
    results = run_pool(len(places), moved, training, size, places)
    assert [h for _, h, _, _ in results] == held
    assert [synced for _, _, synced, _ in results] == [1] * len(places)
    assert_same(union([t for *_, t in results]), union([before for before, *_ in results]))


def swap_experts(rank: int, world_size: int, port: int) -> tuple[Tensors, Any]:
    """HDP ranks 1 and 2 go on as 0 and 1, so that each needs the experts the other has."""
    training = replace(TRAINING, expert=2)
    runtime = joined(rank, world_size, port, MOE, training)
    train_one(runtime, training)
    before = tensors_of(runtime)
    runtime.leave()
    if rank not in {1, 2}:
        return before, None
    held = runtime.join(
        membership_of(rank - 1, 2, port, training, generation=2), pool_shape(2, 128, training)
    )
    synced = runtime.sync_state()
    return before, (held, synced, tensors_of(runtime))


def test_workers_in_new_places_fetch_what_they_need_from_one_another():
    results = run_pool(4, swap_experts)

    there = [after for _, after in results if after is not None]
    assert [(held, synced) for held, synced, _ in there] == [(0, 1)] * 2
    assert_same(union([t for _, _, t in there]), union([before for before, _ in results]))


def torn_apart(
    rank: int, world_size: int, port: int, ahead: frozenset[int]
) -> tuple[int, int, int, Tensors]:
    """Two units of two tensor ranks after step 1; some ranks got through step 2 before a death."""
    training = replace(TRAINING, tensor=2)
    runtime = joined(rank, world_size, port, GQA, training)
    payload = payload_of(plan_with("hydra", [50, 7, 90, 33], pool_shape(2, 128, training)))
    assert runtime.run_step(command_of(payload.plan), payload).applied
    before = tensors_of(runtime)
    runtime.leave()
    if rank in ahead:
        later = {key: tensor + 1 for key, tensor in runtime._state.tensors.items()}
        runtime._state = TrainState(step=2, tensors=later)
    again = [membership_of(rank, 4, port, training, generation=number) for number in (2, 3)]
    held = runtime.join(again[0], pool_shape(2, 128, training))
    synced = runtime.sync_state()
    changes = {key: tensor - before[key] for key, tensor in tensors_of(runtime).items()}
    runtime.leave()
    return held, synced, runtime.join(again[1], pool_shape(2, 128, training)), changes


@pytest.mark.parametrize(("ahead", "step"), [({0, 3}, 2), ({0}, 1), ({0, 2}, 0)])
def test_the_furthest_whole_state_wins_and_without_one_all_start_anew(ahead: set[int], step: int):
    results = run_pool(4, torn_apart, frozenset(ahead))

    assert [held for held, _, _, _ in results] == [2 if r in ahead else 1 for r in range(4)]
    assert [synced for _, synced, _, _ in results] == [step] * 4
    assert [held for _, _, held, _ in results] == [step] * 4
    for _, _, _, changes in results if step else ():
        for key, change in changes.items():
            np.testing.assert_allclose(change, step - 1, atol=1e-6, err_msg=key)


def save_after_one_step(
    rank: int, world_size: int, port: int, training: TrainingSpec, folder: str
) -> Tensors:
    runtime = joined(rank, world_size, port, GQA, training)
    pool = pool_shape(world_size // (training.tensor * training.pipeline), 512, training)
    payload = payload_of(plan_with("hydra", [50, 7, 90, 33], pool))
    assert runtime.run_step(command_of(payload.plan), payload).applied
    runtime.save_shard(folder)
    return tensors_of(runtime)


def load_elsewhere(
    rank: int, world_size: int, port: int, training: TrainingSpec, folder: str
) -> Tensors | str:
    runtime = joined(rank, world_size, port, GQA, training)
    names = tuple(sorted(path.name for path in Path(folder).iterdir()))
    try:
        assert runtime.load_shards(folder, names) == 1
    except CheckpointMismatchError as error:
        return str(error)
    return tensors_of(runtime)


def test_a_checkpoint_goes_on_in_another_pipeline(tmp_path: Path):
    staged = run_pool(2, save_after_one_step, replace(TRAINING, pipeline=2), str(tmp_path))
    whole = run_pool(2, load_elsewhere, TRAINING, str(tmp_path))
    assert_same(union(whole), union(staged))


def test_a_checkpoint_is_refused_by_other_tensor_ranks(tmp_path: Path):
    run_pool(2, save_after_one_step, replace(TRAINING, tensor=2), str(tmp_path))
    (message,) = run_pool(1, load_elsewhere, TRAINING, str(tmp_path))
    assert "the tensor-parallel size it was made with" in message
