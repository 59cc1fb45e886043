"""The driver: one named actor a run. One thread trains; the others answer in milliseconds."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

from hydra_ray.config import Recipe
from hydra_ray.data.batches import GlobalBatches
from hydra_ray.data.index import SequenceIndex
from hydra_ray.driver.capacity import CapacityWatch, is_living_node, living_nodes, workers_that_fit
from hydra_ray.driver.checkpoints import Checkpoints
from hydra_ray.driver.crew import RayCrew, WorkerNeeds
from hydra_ray.driver.errors import RunNotFoundError
from hydra_ray.driver.generation import Rendezvous
from hydra_ray.driver.journal import Journal, Line
from hydra_ray.driver.loop import TrainingLoop
from hydra_ray.driver.metrics import RunMetrics
from hydra_ray.driver.preparation import Preparation
from hydra_ray.driver.requests import Requests
from hydra_ray.driver.settings import UNBOUNDED, settings_of, unit_shape
from hydra_ray.driver.states import RunState
from hydra_ray.preflight import check_cluster, check_size
from hydra_ray.rundir import RunDirectory
from planner.errors import InputError
from planner.registry import get_planner
from workers.actor import RuntimeFactory, megatron_runtime
from workers.rendezvous import start_store

NAMESPACE = "hydra"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a driver is started with."""

    run: str
    recipe: Recipe
    directory: RunDirectory
    make_runtime: RuntimeFactory = field(default=megatron_runtime)


def driver_name(run: str) -> str:
    """The name of a run's actor in the namespace "hydra"."""
    return f"hydra-{run}"


class Driver:
    """One run. `run` trains; every other method answers at once from another thread."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._unit = order.recipe.parallel.scale_unit
        self._requests = Requests(order.recipe.workers // self._unit)
        self._journal = Journal(order.directory, RunMetrics(order.run).observe)
        self._journal.know(run=order.run, num_steps=order.recipe.steps, driver_pid=os.getpid())
        self._crew: RayCrew | None = None
        self._longest = 0  # tokens of the corpus's longest sequence, once it is open

    def __repr__(self) -> str:
        return f"Driver({self._order.run})"

    @ray.method(concurrency_group="train")
    def run(self) -> dict[str, Any]:
        """Train to the end; returns the run in figures.

        Raises:
            HydraError: what ended the run.
        """
        directory = self._order.directory
        with _logging_to(directory):
            try:
                end = self._train()
                self._journal.enter(end)
            except Exception as error:
                log.exception("the run failed")
                facts = {"error": str(error), "kind": type(error).__name__}
                self._journal.enter(RunState.FAILED, **facts)
                raise
            finally:
                directory.clear_endpoint()
        return summary(directory, self._order.run, self._journal.status())

    def _train(self) -> RunState:
        order, recipe = self._order, self._order.recipe
        store = start_store(ray.util.get_node_ip_address())
        with SequenceIndex(recipe.corpus_path) as index:
            self._longest = int(index.lengths.max())
            batches = GlobalBatches(
                index, seed=recipe.seed, batch_tokens=recipe.global_batch_tokens
            )
            preparation = Preparation(
                batches, get_planner(recipe.planner), recipe.cost_model(), ray.put
            )
            crew = RayCrew(self._needs(index), heartbeat_s=recipe.elastic.heartbeat_s)
            self._crew = crew
            watch = CapacityWatch(self._room, self._target, self.scale)
            if recipe.elastic.follow_cluster:
                self._tell_shortage(ray.cluster_resources())
                watch.start()
            try:
                return TrainingLoop(
                    settings_of(recipe, index),
                    crew=crew,
                    preparation=preparation,
                    checkpoints=checkpoints_of(recipe, order.run, order.directory),
                    directory=order.directory,
                    journal=self._journal,
                    requests=self._requests,
                    rendezvous=Rendezvous(host=store.host, port=store.port),
                ).run()
            finally:
                watch.close()
                crew.close()
                preparation.close()

    def _tell_shortage(self, resources: Mapping[str, float]) -> None:
        """Where the cluster is followed, too small a one is no mistake: it may grow yet."""
        try:
            check_cluster(self._order.recipe, resources)
        except InputError as error:
            self._journal.event("cluster_small", value=error.value, limit=error.limit)

    def _room(self) -> int:
        """Workers in whole units that the cluster has room for, within the recipe's bounds."""
        recipe = self._order.recipe
        drained = self._crew.drained_nodes if self._crew else frozenset()
        nodes = living_nodes(drained)
        fit = workers_that_fit(nodes, recipe.cpus_per_worker, recipe.gpus_per_worker)
        wanted = min(fit - recipe.elastic.standbys, recipe.elastic.max or UNBOUNDED)
        return wanted // self._unit * self._unit

    def _target(self) -> tuple[int, int]:
        """The workers wanted, and the number of the request that wants them."""
        wishes = self._requests.wishes()
        return wishes.target_units * self._unit, wishes.operation

    def _needs(self, index: SequenceIndex) -> WorkerNeeds:
        order, recipe = self._order, self._order.recipe
        return WorkerNeeds(
            run=order.run,
            model=recipe.model_spec(index.info.vocab_size),
            training=recipe.training_spec(),
            shape=unit_shape(recipe),
            num_cpus=recipe.cpus_per_worker,
            num_gpus=recipe.gpus_per_worker,
            make_runtime=order.make_runtime,
        )

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """State, generation, workers and the latest step."""
        target = self._requests.wishes().target_units * self._unit
        return {**self._journal.status(), "target_workers": target}

    @ray.method(concurrency_group="control")
    def follow(self, after: int, timeout_s: float) -> tuple[list[Line], RunState]:
        """Steps and events numbered above `after`; waits for one for `timeout_s`."""
        return self._journal.follow(after, timeout_s)

    @ray.method(concurrency_group="control")
    def scale(self, num_workers: int) -> int:
        """Ask for another number of workers; returns the request's number.

        Raises:
            InputError: it makes no whole scale units, is out of the recipe's bounds, or is fewer
                than the longest sequence needs.
        """
        check_size(self._order.recipe, num_workers, self._longest)
        operation = self._requests.scale(num_workers // self._unit)
        self._journal.event("scale", workers=num_workers, operation=operation)
        return operation

    @ray.method(concurrency_group="control")
    def drain(self, name: str) -> list[int]:
        """Ask a worker (by its number) or all workers of a node (by its id) to leave for good.

        Returns:
            The loaded workers that will leave, whole scale units at a time. Workers that are
            starting there are ended, and none is started on that node again.

        Raises:
            InputError: no loaded worker and no node is meant by `name`.
        """
        crew, is_node = self._crew, is_living_node(name)
        if crew is not None and is_node:
            crew.drain_node(name)
        units = {} if crew is None else crew.units_at(name)
        if not (units or is_node):
            raise InputError(
                "no worker or node of that name",
                value=name,
                remedy="hydra-ray status shows the workers and their nodes.",
            )
        for unit in units:
            self._requests.retire(unit)
        workers = [worker for held in units.values() for worker in held]
        self._journal.event("drain", name=name, workers=workers)
        return workers

    @ray.method(concurrency_group="control")
    def save(self) -> None:
        """Ask for a checkpoint at the next step boundary."""
        self._requests.save()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Ask the run to end after the step in hand, with a checkpoint."""
        self._requests.stop()


DriverActor: Any = ray.remote(max_restarts=0, concurrency_groups={"train": 1, "control": 6})(Driver)


def find_driver(run: str) -> Any:
    """The live driver of `run` on the cluster this process is connected to.

    Raises:
        RunNotFoundError: there is none.
    """
    try:
        return ray.get_actor(driver_name(run), namespace=NAMESPACE)
    except ValueError as error:
        raise RunNotFoundError(
            "no such run answers on this cluster",
            value=run,
            remedy="hydra-ray list shows the runs; --address or RAY_ADDRESS names another cluster.",
        ) from error


def checkpoints_of(recipe: Recipe, run: str, directory: RunDirectory) -> Checkpoints:
    """The checkpoint folder of a run: its own under `checkpoint.path`, else in its directory."""
    path = recipe.checkpoint.path
    return Checkpoints(f"{path.rstrip('/')}/{run}" if path else directory.checkpoints)


def summary(directory: RunDirectory, run: str, status: dict[str, Any]) -> dict[str, Any]:
    """A run in figures, from its step lines; a resumed run counts from its very first step.

    Its speed is that of the whole run, with every pause between the first step and the last.
    """
    steps = directory.steps()
    wall_s = steps[-1]["time"] - steps[0]["time"] + steps[0]["wall_s"] if steps else 0.0
    return {
        "run": run,
        "state": status["state"],
        "workers": status.get("num_workers", 0),
        "steps": steps[-1]["step"] if steps else 0,
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None,
        "tokens_per_s": sum(step["tokens"] for step in steps) / wall_s if wall_s > 0 else None,
        "run_dir": str(directory.root),
    }


@contextmanager
def _logging_to(directory: RunDirectory) -> Iterator[None]:
    """Send this process's log lines to run.log as well."""
    handler = logging.FileHandler(directory.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(min(root.level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
