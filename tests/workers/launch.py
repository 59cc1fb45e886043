"""Runs one function on several gloo ranks, each a fork of this process.

Forking after torch has been imported saves every rank its seconds of import. The parent must
hold no process group, and no thread that owns a lock the child needs.
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORK = multiprocessing.get_context("fork")


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time; the message names every such rank."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    in_group: bool = True,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on every rank of a fresh gloo world.

    Args:
        world_size: the number of ranks, each one process with one thread.
        fn: what every rank runs; its result must pickle.
        args: passed on as they are (forked, so they need not pickle).
        timeout_s: wall clock for the whole world, and for each of its collectives.
        in_group: False starts the ranks without a process group, for those that form their own.

    Returns:
        The results, by rank.

    Raises:
        RankError: a rank raised (its traceback is shown), died, or was still running.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        pipes = [FORK.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            FORK.Process(
                target=_rank_main,
                args=(rank, world_size, store if in_group else None, timeout_s, pipe[1], fn, args),
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, writer) in zip(ranks, pipes, strict=True):
            process.start()
            writer.close()  # so that a dead rank reads as end of file
        try:
            answers = _collect([reader for reader, _ in pipes], timeout_s)
        finally:
            _end(ranks)
    errors = [f"rank {rank}: {text}" for rank, (failed, text) in answers.items() if failed]
    if errors:
        raise RankError("\n".join(errors))
    return [answers[rank][1] for rank in range(world_size)]


def _collect(readers: list[Connection], timeout_s: float) -> dict[int, tuple[bool, Any]]:
    """Rank -> (failed, result or error text). Stops soon after the first failure."""
    deadline = time.monotonic() + timeout_s
    answers: dict[int, tuple[bool, Any]] = {}
    open_readers = dict(zip(readers, range(len(readers)), strict=True))
    while open_readers:
        ready = wait(list(open_readers), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = open_readers.pop(reader)
            answers[rank] = _receive(reader)
            if answers[rank][0]:  # the others may wait for this rank for ever: give them a second
                deadline = min(deadline, time.monotonic() + 1.0)
    failed = any(failure for failure, _ in answers.values())
    for rank in open_readers.values():
        answers[rank] = (True, "was left waiting" if failed else f"no answer in {timeout_s} s")
    return dict(sorted(answers.items()))


def _receive(reader: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(reader.recv_bytes())  # noqa: S301  from our own fork
    except EOFError:
        return True, "died without a word"


def _end(ranks: list[BaseProcess]) -> None:
    for process in ranks:
        process.join(timeout=1.0)
        if process.is_alive():
            process.kill()
            process.join()


def _rank_main(
    rank: int,
    world_size: int,
    store: Path | None,
    timeout_s: float,
    answer: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        if store is not None:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        result = (False, fn(rank, world_size, *args))
    except BaseException:  # noqa: BLE001  whatever it is, the parent raises it again
        result = (True, traceback.format_exc())
    answer.send_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
