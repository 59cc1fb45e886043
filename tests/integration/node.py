"""One more node for a Ray cluster that this process started, on this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import ray

DEADLINE_S = 240.0
LEAVE_S = 90.0  # Ray gives a node's last processes up to 30 s
POLL_S = 0.2


class Node:
    """A node of its own raylet; it has joined once made.

    Args:
        address: of the cluster's control store.
        folder: Ray's folder, that of the cluster.
        num_cpus: the room it brings.
    """

    def __init__(self, address: str, folder: str, num_cpus: int) -> None:
        before = living_nodes()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}"]
        command += [f"--num-cpus={num_cpus}", f"--object-store-memory={100 << 20}", "--block"]
        self._process = subprocess.Popen(
            command,
            env=os.environ | {"RAY_TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: len(living_nodes()) > len(before))
        except TimeoutError:
            self._process.terminate()
            raise
        (self.node_id,) = living_nodes() - before

    def end(self) -> None:
        """End the node as a shutdown of its machine would, and wait until the cluster knows."""
        self._process.terminate()
        wait_until(lambda: self.node_id not in living_nodes())

    def wait(self) -> None:
        """Wait for the last of its processes."""
        self._process.wait(timeout=LEAVE_S)


def living_nodes() -> set[str]:
    """The ids of the connected cluster's living nodes."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def wait_until(is_so: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    """Wait for something that is to come.

    Raises:
        TimeoutError: it did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            message = f"what is waited for did not come within {timeout_s:g} s"
            raise TimeoutError(message)
        time.sleep(POLL_S)
