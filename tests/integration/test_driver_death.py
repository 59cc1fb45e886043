"""The driver dies, a checkpoint is damaged, the pool differs: the resumed run goes on."""

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import ray

from hydra_ray.config import Recipe
from hydra_ray.driver.checkpoints import Checkpoints
from hydra_ray.driver.errors import DriverLostError
from tests.integration.conftest import Run, running
from workers.storage import open_storage

CHECKPOINTS_S = 240.0  # from nothing: four processes import torch first
ORPHANS_END_S = 60.0  # Ray gives a frozen process 5 s; the rest is for a machine under load


def pids_after_checkpoints(run: Run, number: int) -> tuple[int, list[int]]:
    """The processes of the driver and of its workers, once `number` checkpoints are valid."""
    after = num_seen = 0
    deadline = time.monotonic() + CHECKPOINTS_S
    while num_seen < number:
        assert time.monotonic() < deadline, "the run writes no checkpoints"
        lines, _ = ray.get(run.driver.follow.remote(after, 30), timeout=90)
        after = lines[-1].number if lines else after
        num_seen += sum(line.record.get("event") == "checkpoint" for line in lines)
    status = ray.get(run.driver.status.remote(), timeout=30)
    return status["driver_pid"], [worker["pid"] for worker in status["workers"]]


def all_end_within(pids: list[int], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def flip_a_byte(checkpoints: Checkpoints, step: int) -> None:
    files, folder = open_storage(checkpoints.folder(step))
    path = f"{folder}/{checkpoints.read(step).shards[0].path}"
    content = bytearray(files.cat_file(path))
    content[len(content) // 2] ^= 1
    files.pipe_file(path, bytes(content))


@pytest.mark.timeout(600)
def test_a_killed_driver_a_damaged_checkpoint_and_other_pools_change_nothing(
    cluster, recipe_of: Callable[..., Recipe], uninterrupted: Run, object_store: str
):
    """Four workers, then three, then two; the checkpoints are on an S3 server."""
    place = {"every_steps": 3, "path": object_store, "keep": 3}
    with running(recipe_of(steps=1000, workers=4, checkpoint=place), "orphaned") as run:
        driver, workers = pids_after_checkpoints(run, 2)
        os.kill(workers[0], signal.SIGSTOP)  # the others now hang in a collective
        os.kill(driver, signal.SIGKILL)
        with pytest.raises(DriverLostError, match="--resume"):
            run.finish()
        assert all_end_within(workers, ORPHANS_END_S)
    checkpoints = Checkpoints(f"{object_store}/orphaned")
    *_, before, newest = checkpoints.steps()
    flip_a_byte(checkpoints, newest)
    ends = (newest + 2, newest + 4)
    for num_workers, end in zip((3, 2), ends, strict=True):
        recipe = recipe_of(steps=end, workers=num_workers, checkpoint=place)
        with running(recipe, "orphaned") as run:
            run.finish()
    assert [event["step"] for event in run.events("checkpoint_damaged")] == [newest]
    assert [event["step"] for event in run.events("restored")] == [before, ends[0]]
    assert {step["num_ranks"] for step in run.steps()} == {4, 3, 2}
    assert [step["step"] for step in run.steps()] == list(range(1, ends[1] + 1))
    assert run.ids() == uninterrupted.ids()[: ends[1]]
    losses = uninterrupted.losses()[: ends[1]]
    np.testing.assert_allclose(run.losses(), losses, rtol=0, atol=1e-4)
