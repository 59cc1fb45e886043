"""The worker processes of a run: members, standbys and those still loading, by scale unit.

Word: the crew is all of them. Everything that starts, calls or ends a worker is here.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hydra_ray.driver.calls import Answers, gather, settle_aborts
from hydra_ray.driver.heartbeat import Heartbeat
from hydra_ray.driver.placement import UnitShape
from hydra_ray.driver.worker import Worker, end_process
from workers.actor import RuntimeFactory, WorkerActor, megatron_runtime
from workers.protocol import ModelSpec, TrainingSpec

log = logging.getLogger(__name__)

# One worker's loss hangs the others.
COLLECTIVE = frozenset({"join", "leave", "sync_state", "run_step"})

NODE_ID_LABEL = "ray.io/node-id"  # Ray puts it on every node

Arguments = Callable[[int], tuple[Any, ...]]


class Crew(Protocol):
    """What the training loop needs of its workers; tests stand in for it without Ray."""

    def staff(self, num_units: int, keep: Sequence[int]) -> None:
        """Start or end spare units until `num_units` live or load; never ends one of `keep`."""

    def watch(self, timeout_s: float) -> dict[int, str]:
        """Let loading units arrive, for at most `timeout_s`.

        Returns:
            The units that failed to load, died or froze meanwhile, with the cause; discarded.
        """

    def ready(self) -> tuple[int, ...]:
        """Units loaded and alive, in order of arrival."""

    def num_loading(self) -> int:
        """Units that are starting."""

    def workers_of(self, unit: int) -> tuple[int, ...]:
        """The worker ids of a unit."""

    def whereabouts(self, workers: Sequence[int]) -> list[dict[str, Any]]:
        """Process and node of each worker, for people to see."""

    def call(
        self, workers: Sequence[int], method: str, arguments: Arguments, *, timeout_s: float
    ) -> Answers:
        """Call a method on each worker at once and wait for all."""

    def discard(self, units: Iterable[int]) -> None:
        """End units for certain, whatever they are doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeeds:
    """What starts a worker: its claim on the cluster and what it is to train."""

    run: str
    model: ModelSpec
    training: TrainingSpec
    shape: UnitShape
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    make_runtime: RuntimeFactory = megatron_runtime


@dataclass(slots=True)
class Unit:
    """One scale unit.

    `loading` holds the references of its workers' load calls; where they run is known only after,
    and that it is not on one of the nodes it `avoids`.
    """

    workers: list[Worker]
    loading: list[Any]
    group: PlacementGroup | None
    started: float
    avoids: frozenset[str] = frozenset()


class RayCrew:
    """The crew on Ray. The training thread changes it; other threads read, and drain nodes."""

    def __init__(self, needs: WorkerNeeds, *, heartbeat_s: float) -> None:
        self._needs = needs
        self._units: dict[int, Unit] = {}
        self._next_unit = 0
        self._drained_nodes: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._heartbeat = Heartbeat(self.loaded_workers, heartbeat_s)
        self._heartbeat.start()

    def staff(self, num_units: int, keep: Sequence[int]) -> None:
        """Start or end spare units until `num_units` live or load; see `Crew.staff`."""
        drained = self.drained_nodes
        # What waits for room may be given some on any node that was not drained when it asked.
        self.discard(
            unit for unit, held in self._units.items() if held.loading and held.avoids != drained
        )
        while len(self._units) < num_units:
            self._start_unit(drained)
        surplus = len(self._units) - num_units
        if surplus > 0:
            spare = [unit for unit in self._units if unit not in set(keep)]
            spare.sort(key=lambda unit: bool(self._units[unit].loading))
            self.discard(spare[-surplus:])

    def watch(self, timeout_s: float) -> dict[int, str]:
        """Let loading units arrive; see `Crew.watch`."""
        refs = {ref: unit for unit, held in self._units.items() for ref in held.loading}
        lost: dict[int, str] = {}
        if refs:
            ray.wait(list(refs), num_returns=1, timeout=timeout_s)
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            for unit in {refs[ref] for ref in done}:
                if set(self._units[unit].loading) <= set(done):
                    self._arrive(unit, lost)
        silent = self._heartbeat.lost()
        for unit in self.ready():
            causes = [silent[w] for w in self.workers_of(unit) if w in silent]
            if causes:
                lost[unit] = "; ".join(causes)
        self.discard(lost)
        return lost

    def close(self) -> None:
        """End every worker and the heartbeat."""
        self._heartbeat.close()
        self.discard(tuple(self._units))

    def _arrive(self, unit: int, lost: dict[int, str]) -> None:
        held = self._units[unit]
        refs = dict(zip((w.worker_id for w in held.workers), held.loading, strict=True))
        answers = gather(refs, timeout_s=30)
        if not answers.complete:
            lost[unit] = "; ".join([*answers.lost.values(), *answers.unblocked.values()])
            return
        workers = [
            Worker(
                worker_id=w.worker_id,
                actor=w.actor,
                pid=int(answers.results[w.worker_id]["pid"]),
                node_id=str(answers.results[w.worker_id]["node_id"]),
            )
            for w in held.workers
        ]
        with self._lock:  # re-entered last, so that `ready` tells the order of arrival
            may_stay = self._drained_nodes.isdisjoint(w.node_id for w in workers)
            if may_stay:
                del self._units[unit]
                self._units[unit] = Unit(workers, [], held.group, held.started)
        if not may_stay:
            log.info("unit %d had been starting on a node that is drained", unit)
            self.discard([unit])
            return
        log.info("unit %d is ready after %.1f s", unit, time.monotonic() - held.started)

    def ready(self) -> tuple[int, ...]:
        """Units loaded and alive, in order of arrival."""
        return tuple(unit for unit, held in self._units.items() if not held.loading)

    def num_loading(self) -> int:
        """Units that are starting."""
        return sum(1 for held in self._units.values() if held.loading)

    def workers_of(self, unit: int) -> tuple[int, ...]:
        """The worker ids of a unit."""
        return tuple(worker.worker_id for worker in self._units[unit].workers)

    def units_at(self, name: str) -> dict[int, list[int]]:
        """Loaded units with a worker of this number or on this node, and their workers.

        Safe from any thread.
        """
        with self._lock:
            loaded = {unit: held.workers for unit, held in self._units.items() if not held.loading}
        return {
            unit: [worker.worker_id for worker in workers]
            for unit, workers in loaded.items()
            if any(name in {str(worker.worker_id), worker.node_id} for worker in workers)
        }

    @property
    def drained_nodes(self) -> frozenset[str]:
        """The nodes where nothing is started any more; safe from any thread."""
        with self._lock:
            return self._drained_nodes

    def drain_node(self, node_id: str) -> None:
        """Start nothing more on this node, and end what is starting there.

        Safe from any thread.
        """
        with self._lock:
            self._drained_nodes |= {node_id}

    def loaded_workers(self) -> dict[int, Worker]:
        """Every loaded worker by id; safe from any thread."""
        with self._lock:
            held = [unit for unit in self._units.values() if not unit.loading]
        return {worker.worker_id: worker for unit in held for worker in unit.workers}

    def whereabouts(self, workers: Sequence[int]) -> list[dict[str, Any]]:
        """Process and node of each worker, for people to see."""
        loaded = self.loaded_workers()
        return [{"worker": w, "pid": loaded[w].pid, "node": loaded[w].node_id} for w in workers]

    def call(
        self, workers: Sequence[int], method: str, arguments: Arguments, *, timeout_s: float
    ) -> Answers:
        """Call a method on each worker at once and wait for all; see `gather`."""
        actors = {w: held.actor for w, held in self.loaded_workers().items()}

        aborts: dict[int, Any] = {}

        def unblock(busy: list[int]) -> None:
            aborts.update({worker: actors[worker].abort.remote() for worker in busy})

        here = [w for w in workers if w in actors]
        refs = {w: getattr(actors[w], method).remote(*arguments(w)) for w in here}
        is_collective = method in COLLECTIVE
        answers = gather(refs, timeout_s=timeout_s, unblock=unblock if is_collective else None)
        settle_aborts(aborts, answers)
        answers.lost |= dict.fromkeys(set(workers) - set(here), "it had been ended before the call")
        return answers

    def discard(self, units: Iterable[int]) -> None:
        """End units for certain; see `Crew.discard`."""
        for unit in tuple(units):
            with self._lock:
                held = self._units.pop(unit, None)
            if held is None:
                continue
            for worker in held.workers:
                end_process(worker)
            if held.group is not None:
                remove_placement_group(held.group)

    def _start_unit(self, drained: frozenset[str]) -> None:
        unit, shape = self._next_unit, self._needs.shape
        self._next_unit += 1
        bundle = {"CPU": self._needs.num_cpus, "GPU": self._needs.num_gpus}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        selector = _all_nodes_but(drained)
        group = None
        if shape.num_workers > 1 and bundle:  # one process is reserved whole or not at all anyway
            group = placement_group(
                [bundle] * shape.num_workers,
                strategy="PACK",
                bundle_label_selector=[selector] * shape.num_workers,
            )
        workers = [
            Worker(worker_id=worker_id, actor=self._start_worker(worker_id, selector, group, index))
            for index, worker_id in enumerate(
                range(unit * shape.num_workers, (unit + 1) * shape.num_workers)
            )
        ]
        loading = [worker.actor.load.remote() for worker in workers]
        with self._lock:
            self._units[unit] = Unit(workers, loading, group, time.monotonic(), drained)

    def _start_worker(
        self,
        worker_id: int,
        selector: dict[str, str],
        group: PlacementGroup | None,
        bundle_index: int,
    ) -> Any:
        needs = self._needs
        strategy: Any = "SPREAD"
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle_index
            )
        return WorkerActor.options(
            name=f"hydra-{needs.run}-worker-{worker_id}",
            num_cpus=needs.num_cpus,
            num_gpus=needs.num_gpus,
            scheduling_strategy=strategy,
            label_selector=None if group else selector,
            runtime_env={"env_vars": _environment(needs.num_gpus)},
        ).remote(needs.run, worker_id, needs.model, needs.training, needs.make_runtime)


def _all_nodes_but(drained: frozenset[str]) -> dict[str, str]:
    """Ray's selector of the nodes where a worker may start."""
    return {NODE_ID_LABEL: f"!in({','.join(sorted(drained))})"} if drained else {}


def _environment(num_gpus: float) -> dict[str, str]:
    """What a worker's process is started with.

    NCCL's watchdog would end the process when a peer dies; here survivors go on. A worker that
    claims no GPU sees none, which Ray no longer sees to.
    """
    threads = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    return threads if num_gpus else threads | {"CUDA_VISIBLE_DEVICES": ""}
