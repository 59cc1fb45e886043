"""The launcher of test worlds tells what went wrong, and where, and leaves nothing running."""

import os
import threading

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.workers.launch import RankError, run_ranks


def sum_of_ranks(rank, world_size, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, int(total)


def one_raises(rank, world_size):
    if rank == 1:
        raise ValueError("rank one objects")
    dist.barrier()


def one_dies(rank, world_size):
    if rank == 1:
        os._exit(3)
    dist.barrier()


def one_waits_for_ever(rank, world_size):
    if rank == 1:
        threading.Event().wait()
    return rank


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def test_results_come_back_by_rank():
    assert run_ranks(3, sum_of_ranks, 10) == [(0, 33), (1, 33), (2, 33)]


def test_an_error_names_its_rank_and_keeps_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*ValueError: rank one objects"):
        run_ranks(2, one_raises)


def test_a_dead_rank_is_named():
    with pytest.raises(RankError, match="rank 1: died without a word"):
        run_ranks(2, one_dies)


def test_a_rank_that_waits_for_ever_is_given_up():
    with pytest.raises(RankError, match="rank 1: no answer"):
        run_ranks(2, one_waits_for_ever, timeout_s=3.0)
