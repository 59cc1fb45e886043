"""Prepares steps ahead: while step t trains, step t + 1 is read, planned, checked and put."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hydra_ray.data.batches import DataCursor, GlobalBatch, GlobalBatches
from hydra_ray.routing import route
from planner.cost import CostModel
from planner.interface import Planner
from planner.plan import Plan
from planner.pool import PoolShape
from planner.validate import validate
from workers.protocol import StepCommand, StepPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """What decides a step's plan: its number, where its batch starts, and the pool."""

    step: int
    cursor: DataCursor
    pool: PoolShape
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step that is ready to train. `payload` is its reference in the object store."""

    key: StepKey
    batch: GlobalBatch
    plan: Plan
    command: StepCommand
    payload: Any
    plan_s: float


class Preparation:
    """Prepares one step at a time on a thread of its own.

    Args:
        batches: the stream of global batches; only this thread reads it.
        planner: makes the plans.
        cost: the cost model the planner is given.
        put: places a payload where every worker can read it, and returns the reference.
        timeout_s: limit of reading and planning one step.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        planner: Planner,
        cost: CostModel,
        put: Callable[[StepPayload], Any],
        *,
        timeout_s: float = 600.0,
    ) -> None:
        self._batches, self._planner, self._cost, self._put = batches, planner, cost, put
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="preparation")
        self._ahead: tuple[StepKey, Future[PreparedStep]] | None = None

    def start(self, key: StepKey) -> None:
        """Begin to prepare `key` in the background."""
        self._ahead = (key, self._thread.submit(self._prepare, key))

    def take(self, key: StepKey) -> PreparedStep:
        """The prepared step of `key`: at once if it was started before, else after its making.

        Raises:
            InfeasibleError: the batch does not fit the pool.
            TimeoutError: it took longer than `timeout_s`.
        """
        if self._ahead is None or self._ahead[0] != key:
            self.start(key)
        assert self._ahead is not None  # noqa: S101  start() has just set it
        _, future = self._ahead
        self._ahead = None
        return future.result(timeout=self._timeout_s)

    def close(self) -> None:
        """Stop after the step in hand."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, key: StepKey) -> PreparedStep:
        batch = self._batches.next(key.cursor)
        started = time.perf_counter()
        plan = self._planner.plan(batch.lengths, key.pool, self._cost)
        plan_s = time.perf_counter() - started
        validate(plan)
        command, payload = route(batch, plan, step=key.step, generation=key.generation)
        return PreparedStep(
            key=key,
            batch=batch,
            plan=plan,
            command=command,
            payload=self._put(payload),
            plan_s=plan_s,
        )
