"""The same loss and return of a node under our trainer and under Ray Train's elastic one.

The cluster has a head with room for three workers and a node with room for one. The worker on
the node is SIGKILLed and its node leaves; later a node of the same size joins. Both trainers may
use three to four workers and follow the cluster. Ray Train keeps its defaults except for how
often it looks at the cluster, which is made short.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import ray

from benchmarks.elastic_rival_train import RayTrainRun
from benchmarks.elastic_run import elastic_run
from tests.integration.node import Node, wait_until

Row = dict[str, Any]
HEAD_CPUS, NODE_CPUS = 3, 1
SETTLED_STEPS = 60  # undisturbed steps before each change and after the last


class Trainer(Protocol):
    """One of the two, as the benchmark sees it."""

    def completed(self) -> list[Row]:
        """All completed steps in order, each with "step", "time" and "num_ranks"."""

    def pid_on(self, node_id: str) -> int:
        """The process of the worker on a node."""


def rival_rows(folder: Path) -> Iterator[Row]:
    """Pause and redone steps of both for 4 -> 3 -> 4, and how they compare.

    Expects `corpus.parquet` in `folder`, and no connected cluster.
    """
    with _cluster(folder / "rival") as join:
        ours = _lose_and_return(lambda: _hydra(folder), join)
        theirs = _lose_and_return(lambda: RayTrainRun.running(folder / "ray_train"), join)
    for name, measured in (("hydra", ours), ("ray_train", theirs)):
        for figure, value in measured.items():
            unit = "steps" if figure == "redone_steps" else "s"
            yield {"figure": f"{name}_{figure}", "value": round(value, 3), "unit": unit}
    ratios = {
        name: round(theirs[name] / ours[name], 2) for name in ("loss_pause_s", "return_pause_s")
    }
    yield {
        "figure": "ray_train_pause_over_ours",
        "value": min(ratios.values()),
        "unit": "x",
        **ratios,
    }


def _lose_and_return(start: Callable[[], Any], join: Callable[[], Node]) -> dict[str, float]:
    """Train on four, lose a node with its worker, let one come back, and say what that cost."""
    node = join()
    with start() as trainer:
        wait_until(lambda: _settled(trainer.completed(), 4, since=0.0))
        lost_at = time.time()
        os.kill(trainer.pid_on(node.node_id), signal.SIGKILL)
        node.end()
        wait_until(lambda: _settled(trainer.completed(), 3, since=lost_at))
        back_at = time.time()
        node = join()
        wait_until(lambda: _settled(trainer.completed(), 4, since=back_at))
        ended_at = time.time()
        steps = trainer.completed()
    node.end()
    return {
        "undisturbed_gap_s": _longest_gap(steps[-SETTLED_STEPS:], back_at, ended_at),
        "loss_pause_s": _longest_gap(steps, lost_at, back_at),
        "return_pause_s": _longest_gap(steps, back_at, ended_at),
        "redone_steps": len(steps) - len({step["step"] for step in steps}),
    }


def _settled(steps: Sequence[Row], num_ranks: int, since: float) -> bool:
    """Whether the latest steps all ran on that many workers, after `since`."""
    latest = steps[-SETTLED_STEPS:]
    return len(latest) == SETTLED_STEPS and all(
        step["num_ranks"] == num_ranks and step["time"] > since for step in latest
    )


def _longest_gap(steps: Sequence[Row], start: float, end: float) -> float:
    """Longest time without a completed step, of the gaps that end between `start` and `end`."""
    times = [float(step["time"]) for step in steps]
    return max(after - before for before, after in pairwise(times) if start < after <= end)


class _Hydra:
    """Our run, as the benchmark sees it."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.completed = run.directory.steps

    def pid_on(self, node_id: str) -> int:
        """The process of the worker on a node."""
        workers = self._run.ask("status")["workers"]
        return next(int(worker["pid"]) for worker in workers if worker["node"] == node_id)


@contextmanager
def _hydra(folder: Path) -> Iterator[Trainer]:
    bounds: Row = {"min": 3, "max": 4, "follow_cluster": True}
    with elastic_run(folder, "rival", num_workers=4, cpus_per_worker=1.0, **bounds) as run:
        yield _Hydra(run)


@contextmanager
def _cluster(folder: Path) -> Iterator[Callable[[], Node]]:
    """A Ray of its own; yields what lets another node join."""
    context = ray.init(
        address="local",
        namespace="hydra",
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=HEAD_CPUS,
        object_store_memory=200 << 20,
        _temp_dir=str(folder),
    )
    nodes: list[Node] = []

    def join() -> Node:
        nodes.append(Node(context.address_info["gcs_address"], str(folder), NODE_CPUS))
        return nodes[-1]

    try:
        yield join
    finally:
        for node in nodes:
            node.end()
            node.wait()
        ray.shutdown()
