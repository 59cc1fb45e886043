"""Starts a run's driver on a Ray cluster, follows it, and ends it: what `train` and jobs share."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from hydra_ray.config import Recipe, dump_recipe
from hydra_ray.driver.actor import NAMESPACE, DriverActor, Order, driver_name
from hydra_ray.driver.errors import DriverLostError
from hydra_ray.driver.journal import Line
from hydra_ray.driver.states import FINAL
from hydra_ray.rundir import Endpoint, RunDirectory
from planner.errors import HydraError
from workers.actor import RuntimeFactory, megatron_runtime

FOLLOW_S = 1.0
ANSWER_S = 60.0
Show = Callable[[Line], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A started run: its driver, and the reference that holds its outcome."""

    run: str
    driver: Any
    outcome: Any


@contextmanager
def embedded_ray(*, dashboard: bool) -> Iterator[str]:
    """A Ray cluster of this process's own, ended with the block; yields its dashboard's URL.

    It never joins a cluster that is already there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    context = ray.init(
        address="local", namespace=NAMESPACE, include_dashboard=dashboard, log_to_driver=False
    )
    try:
        yield f"http://{context.dashboard_url}" if context.dashboard_url else ""
    finally:
        ray.shutdown()


def start(
    recipe: Recipe,
    run: str,
    directory: RunDirectory,
    *,
    dashboard_url: str = "",
    local: bool,
    make_runtime: RuntimeFactory = megatron_runtime,
) -> LiveRun:
    """Write the run directory and start the driver on the connected cluster."""
    directory.create(dump_recipe(recipe))
    endpoint = Endpoint(
        run=run,
        ray_address=ray.get_runtime_context().gcs_address,
        dashboard_url=dashboard_url,
        local_pid=os.getpid() if local else None,
        auth_mode=os.environ.get("RAY_AUTH_MODE"),  # ray.init has set it for a cluster of its own
    )
    directory.write_endpoint(endpoint)
    order = Order(run=run, recipe=recipe, directory=directory, make_runtime=make_runtime)
    driver = DriverActor.options(name=driver_name(run), num_cpus=0).remote(order)
    return LiveRun(run=run, driver=driver, outcome=driver.run.remote())


def follow(live: LiveRun, show: Show) -> dict[str, Any]:
    """Show every step and event until the run ends; returns the run in figures.

    Raises:
        HydraError: what ended the run.
    """
    after, state = 0, None
    while state not in FINAL:
        lines, state = answer(live.driver.follow.remote(after, FOLLOW_S))
        for line in lines:
            show(line)
            after = line.number
    return dict(answer(live.outcome))


def stop(live: LiveRun) -> None:
    """Ask the run to end after the step in hand; `follow` then sees it out."""
    answer(live.driver.stop.remote())


def answer(ref: Any) -> Any:
    """The answer of the driver, with its errors as they were raised there."""
    try:
        return ray.get(ref, timeout=ANSWER_S)
    except RayTaskError as error:
        if isinstance(error.cause, HydraError):
            raise error.cause from None
        raise
    except (RayActorError, GetTimeoutError) as error:
        raise DriverLostError(
            "the run's driver died or does not answer",
            value=f"{type(error).__name__}: {error}",
            remedy="See run.log in the run directory; continue with --resume.",
        ) from error
