"""Finds a run from another process: by its run directory, or on the cluster the user names.

Ray is imported inside, since it reads RAY_AUTH_MODE only as it is imported, and that must be the
mode of the cluster the run is on.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra_ray.driver.errors import RunNotFoundError
from hydra_ray.rundir import RunDirectory, is_alive, run_directory

AUTH_MODE = "RAY_AUTH_MODE"


@contextmanager
def connected_driver(run: str, storage_path: str, address: str | None) -> Iterator[Any]:
    """The live driver of `run`; the connection ends with the block.

    Args:
        run: the run's name.
        storage_path: where run directories are.
        address: a Ray cluster (host:port) that the user names; else that of the run directory,
            else RAY_ADDRESS. No other cluster is ever joined.

    Raises:
        RunNotFoundError: the run has ended, never was, or its cluster is gone.
    """
    directory = run_directory(storage_path, run)
    where = address or live_address(directory) or _from_environment()
    if where is None:
        raise RunNotFoundError(
            "the run is not running here",
            value=run,
            remedy="Pass --storage-path of its run directory, or --address of its Ray cluster.",
        )
    endpoint = directory.endpoint()
    if endpoint is not None and endpoint.auth_mode is not None:
        os.environ.setdefault(AUTH_MODE, endpoint.auth_mode)
    import ray

    from hydra_ray.driver.actor import NAMESPACE, find_driver

    try:
        ray.init(address=where, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError) as error:
        raise RunNotFoundError(
            "the run's Ray cluster does not answer",
            value=where,
            limit=str(error).splitlines()[0],
            remedy="If its machine or process died, continue the run with --resume.",
        ) from error
    try:
        yield find_driver(run)
    finally:
        ray.shutdown()


def live_address(directory: RunDirectory) -> str | None:
    """Where the run of this directory says it answers; None if its process is gone."""
    endpoint = directory.endpoint()
    if endpoint is None:
        return None
    if endpoint.local_pid is not None and not is_alive(endpoint.local_pid):
        return None
    return endpoint.ray_address


def _from_environment() -> str | None:
    """RAY_ADDRESS, unless it is the URL of a dashboard or asks for just any cluster."""
    address = os.environ.get("RAY_ADDRESS", "")
    return address if address and "://" not in address and address != "auto" else None
