"""Follows the cluster: as many scale units as its nodes have room for."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray

from planner.errors import InputError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


def workers_that_fit(nodes: Sequence[Mapping[str, float]], num_cpus: float, num_gpus: float) -> int:
    """Workers that the nodes have room for, each whole on one node.

    Args:
        nodes: the resources of each living node.
        num_cpus: cores a worker claims.
        num_gpus: GPUs a worker claims.
    """
    claims = {name: each for name, each in (("CPU", num_cpus), ("GPU", num_gpus)) if each}
    return sum(
        min((int(node.get(name, 0.0) / each) for name, each in claims.items()), default=0)
        for node in nodes
    )


class CapacityWatch(threading.Thread):
    """Asks for another number of workers whenever the cluster's room changes.

    Args:
        room: tells how many workers there is room for; called from this thread.
        scale: asks for a number of workers; refuses it with an InputError.
    """

    def __init__(self, room: Callable[[], int], scale: Callable[[int], Any]) -> None:
        super().__init__(name="capacity", daemon=True)
        self._room, self._scale = room, scale
        self._closing = threading.Event()

    def run(self) -> None:
        """Look until closed."""
        known: int | None = None
        while not self._closing.wait(LOOK_EVERY_S):
            room = self._room()
            if room != known:
                log.info("the cluster has room for %d workers", room)
                with suppress(InputError):  # out of the recipe's bounds: stay as we are
                    self._scale(room)
            known = room

    def close(self) -> None:
        """End the thread."""
        self._closing.set()


def living_nodes(drained: frozenset[str] = frozenset()) -> list[Mapping[str, float]]:
    """The resources of each living node of the connected cluster, those of `drained` left out."""
    return [
        node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in drained
    ]


def is_living_node(name: str) -> bool:
    """Whether the connected cluster has a living node of this id."""
    return any(node["Alive"] and node["NodeID"] == name for node in ray.nodes())
