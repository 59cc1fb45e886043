"""Follows the cluster: as many scale units as its nodes have room for."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import ray
from ray.exceptions import RayError

from planner.errors import InputError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
ASK_AGAIN_S = 300.0


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

    What the room is for may be in use by others: a request that was given up for that is made
    again after a while. Somebody else's later request stays until the room changes.

    Args:
        room: tells how many workers there is room for; called from this thread.
        target: tells the workers wanted, and the number of the request for them.
        scale: asks for a number of workers, and tells the request's number; refuses it with an
            InputError.
    """

    def __init__(
        self,
        room: Callable[[], int],
        target: Callable[[], tuple[int, int]],
        scale: Callable[[int], int],
    ) -> None:
        super().__init__(name="capacity", daemon=True)
        self._room, self._target, self._scale = room, target, scale
        self._closing = threading.Event()
        self._known: int | None = None
        self._operation, self._asked_at = -1, -math.inf

    def run(self) -> None:
        """Look until closed."""
        while not self._closing.wait(LOOK_EVERY_S):
            try:
                self.look(time.monotonic())
            except (RayError, RuntimeError) as error:  # the control store is away: it comes back
                log.warning("the cluster's room is not known now: %s", error)

    def look(self, now_s: float) -> None:
        """Ask, if there is a reason to."""
        room, (target, operation) = self._room(), self._target()
        was_given_up = operation == self._operation and target != room
        if room != self._known or (was_given_up and now_s - self._asked_at >= ASK_AGAIN_S):
            log.info("the cluster has room for %d workers", room)
            with suppress(InputError):  # out of the recipe's bounds: stay as we are
                self._operation, self._asked_at = self._scale(room), now_s
        self._known = room

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
