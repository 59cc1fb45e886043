"""One worker process as the driver sees it, and how it is ended for certain."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker process and its handle; `pid` and `node_id` are known once it has loaded."""

    worker_id: int
    actor: ActorHandle
    pid: int = 0
    node_id: str = ""


def end_process(worker: Worker) -> None:
    """End a worker whatever it is doing, frozen or not.

    Ray ends a frozen process only after 5 s, so one on this node is killed directly first.
    """
    if worker.pid and worker.node_id == ray.get_runtime_context().get_node_id():
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
    ray.kill(worker.actor, no_restart=True)
