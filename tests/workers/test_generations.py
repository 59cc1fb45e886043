"""Joining, leaving, losing a peer: the same processes go from pool to pool and keep their state."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from planner.pool import PoolShape
from tests.workers.pool import (
    GQA,
    Part,
    assembled,
    command_of,
    joined,
    membership_of,
    parameter_parts,
    payload_of,
    plan_with,
    pool_shape,
    run_pool,
    trained,
    weights_of,
)
from workers.errors import GenerationError, StepFailedError
from workers.groups import Place, place_of, pool_subsets
from workers.protocol import TrainingSpec
from workers.runtime import WorkerRuntime

# Megatron takes the norm to clip by in float32, which would hide what float64 shows.
TRAINING = TrainingSpec(seed=3, dtype="float64", eps=1e-3, weight_decay=0.01, clip_grad=0.0)
LENGTHS = [[50, 7, 1, 90], [33, 2, 90], [16, 21, 90, 3], [60, 60, 5], [100, 9], [8, 8, 8, 70]]


def payload_at(step: int, num_ranks: int):
    plan = plan_with(
        "hydra", LENGTHS[(step - 1) % len(LENGTHS)], pool_shape(num_ranks, 96, TRAINING)
    )
    return payload_of(plan, seed=step)


def join(runtime: WorkerRuntime, rank: int, size: int, port: int, generation: int) -> int:
    membership = membership_of(rank, size, port, TRAINING, generation=generation)
    return runtime.join(membership, pool_shape(size, 96, TRAINING))


def train(runtime: WorkerRuntime, steps: range, size: int, generation: int) -> None:
    for step in steps:
        payload = payload_at(step, size)
        assert runtime.run_step(command_of(payload.plan, step, generation), payload).applied


def resized(rank: int, world_size: int, port: int) -> tuple[list[int], list[Part]]:
    """Steps 1-2 on four workers, 3-4 on three, 5-6 on four again; worker 3 sits out."""
    runtime = WorkerRuntime(GQA, TRAINING)
    runtime.load()
    held = [join(runtime, rank, 4, port, 1)]
    train(runtime, range(1, 3), 4, generation=1)
    runtime.leave()
    if rank < 3:
        held.append(join(runtime, rank, 3, port, 2))
        train(runtime, range(3, 5), 3, generation=2)
        runtime.leave()
    held.append(join(runtime, rank, 4, port, 3))
    held.append(runtime.sync_state())
    train(runtime, range(5, 7), 4, generation=3)
    weights = parameter_parts(runtime)
    runtime.leave()
    return held, weights


def test_a_resized_pool_ends_where_an_uninterrupted_one_does():
    payloads = [payload_at(step, 4) for step in range(1, 7)]
    straight = weights_of(run_pool(4, trained, GQA, TRAINING, payloads))

    results = run_pool(4, resized)

    assert [held for held, _ in results] == [[0, 2, 4, 4]] * 3 + [[0, 2, 4]]
    found = assembled(part for _, parts in results for part in parts)
    for name, expected in straight.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-11, err_msg=name)


def newcomer(rank: int, world_size: int, port: int) -> tuple[int, int, dict[str, object]]:
    """Worker 0 trains alone; worker 1 starts fresh and takes its state."""
    runtime = WorkerRuntime(GQA, TRAINING)
    runtime.load()
    if rank == 0:
        join(runtime, 0, 1, port, 1)
        train(runtime, range(1, 3), 1, generation=1)
        runtime.leave()
    held = join(runtime, rank, 2, port, 2)
    synced = runtime.sync_state()
    train(runtime, range(3, 4), 2, generation=2)
    return held, synced, runtime.fingerprint()


def test_a_newcomer_takes_the_furthest_state():
    (held_0, synced_0, print_0), (held_1, synced_1, print_1) = run_pool(2, newcomer)

    assert (held_0, held_1) == (2, 0)
    assert (synced_0, synced_1) == (2, 2)
    assert print_0 == print_1


def usage() -> dict[str, int]:
    gc.collect()
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "resident_mib": int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024,
    }


def many_generations(rank: int, world_size: int, port: int, count: int) -> list[dict[str, int]]:
    runtime = WorkerRuntime(GQA, TRAINING)
    runtime.load()
    seen = []
    for generation in range(1, count + 1):
        join(runtime, rank, world_size, port, generation)
        train(runtime, range(generation, generation + 1), world_size, generation)
        runtime.leave()
        seen.append(usage())
    return seen


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_generations_leave_nothing_behind(count: int):
    for seen in run_pool(2, many_generations, count):
        settled, last = seen[3], seen[-1]
        assert last["groups"] == 0
        assert last["threads"] <= settled["threads"]
        assert last["files"] <= settled["files"]
        assert last["resident_mib"] <= settled["resident_mib"] + 16


def survive(rank: int, world_size: int, port: int, victim: int) -> Any:
    """One worker dies before a step; the others are aborted, form a pool of three, and redo it."""
    runtime = WorkerRuntime(GQA, TRAINING)
    runtime.load()
    join(runtime, rank, 4, port, 1)
    train(runtime, range(1, 2), 4, generation=1)
    if rank == victim:
        return None
    watchdog = threading.Timer(1.0, runtime.abort)  # as the driver does to those still in the step
    watchdog.start()
    payload = payload_at(2, 4)
    began = time.monotonic()
    with pytest.raises(StepFailedError):
        runtime.run_step(command_of(payload.plan, 2), payload)
    watchdog.cancel()
    freed_s = time.monotonic() - began
    runtime.leave()
    survivors = [r for r in range(4) if r != victim]
    held = join(runtime, survivors.index(rank), 3, port, 2)
    train(runtime, range(2, 3), 3, generation=2)
    return held, freed_s, runtime.fingerprint()["weights"]


@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_are_freed_and_redo_the_step(victim: int):
    answers = [answer for answer in run_pool(4, survive, victim) if answer is not None]

    assert len(answers) == 3
    for held, freed_s, weights in answers:
        assert held == 1
        assert freed_s < 10  # the collectives' own timeout is 30 s
        assert weights == answers[0][2]


def break_off(rank: int, world_size: int, port: int, where: str) -> tuple[int, int]:
    """Step 2 runs out of memory while it takes the gradients' norm, or changes weights."""
    runtime = WorkerRuntime(GQA, TRAINING)
    runtime.load()
    join(runtime, rank, world_size, port, 1)
    train(runtime, range(1, 2), world_size, generation=1)
    replica = runtime._here()[0]

    def run_out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    setattr(replica.optimizer, where, run_out_of_memory)
    payload = payload_at(2, world_size)
    with pytest.raises(StepFailedError, match="out of memory"):
        runtime.run_step(command_of(payload.plan, 2), payload)
    runtime.leave()
    return join(runtime, rank, world_size, port, 2), int(str(runtime.fingerprint()["step"]))


@pytest.mark.parametrize(("where", "held"), [("prepare", 1), ("apply", 0)])
def test_weights_between_two_steps_are_no_state(where: str, held: int):
    assert run_pool(1, break_off, where) == [(held, held)]


def test_a_worker_joins_one_generation_at_a_time():
    def twice(rank: int, world_size: int, port: int) -> None:
        runtime = joined(rank, world_size, port, GQA, TRAINING)
        with pytest.raises(GenerationError):
            join(runtime, rank, world_size, port, 2)

    run_pool(1, twice)


def test_places_follow_megatrons_order():
    assert place_of(0, num_ranks=3, tensor=2) == Place(hdp=0, tensor=0, stage=0)
    assert place_of(5, num_ranks=3, tensor=2) == Place(hdp=2, tensor=1, stage=0)
    assert place_of(6, num_ranks=3, tensor=2) == Place(hdp=0, tensor=0, stage=1)


@pytest.mark.parametrize(
    ("num_ranks", "count"), [(1, 0), (2, 1), (3, 2), (8, 17), (16, 49), (64, 321)]
)
def test_groups_are_all_aligned_chunks_and_their_splits_each_once(num_ranks: int, count: int):
    subsets = pool_subsets(PoolShape(num_ranks=num_ranks, token_budget=1))

    assert len(set(subsets)) == len(subsets) == count
