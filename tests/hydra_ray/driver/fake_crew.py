"""A crew without Ray: workers are plain objects, faults happen exactly where a test says.

A fake worker keeps what a real one keeps between generations (the applied step, and the history
of batches its weights have seen), refuses what a real one refuses, and dies or fails at a chosen
point of a step. So the driver's loop is tested as it is, one turn at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hydra_ray.driver.calls import Answers
from planner.pool import PoolShape
from workers.protocol import Membership, ShardInfo, StepCommand, StepPayload, StepResult

When = Literal["before", "after"]


@dataclass(slots=True)
class FakeWorker:
    """One worker: `history` stands for its weights."""

    applied: int = 0
    history: list[tuple[int, ...]] = field(default_factory=list)
    membership: Membership | None = None
    is_dead: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """`worker` is lost at a call of `method`: before it has an effect there, or after.

    For run_step `step` says which one, and `applied_by` how many of the others (by rank) had
    already applied it when the loss was felt.
    """

    worker: int
    method: str
    step: int | None = None
    when: When = "before"
    applied_by: int = 0


class FakeCrew:
    """Loads a unit after `load_turns` looks; loses workers as `faults` say."""

    def __init__(
        self,
        faults: Iterable[Fault] = (),
        *,
        load_turns: int = 1,
        capacity: int = 64,
        shared: dict[str, Any] | None = None,
        loss_of: Callable[[StepPayload], float] = lambda _: 1.0,
    ) -> None:
        self.workers: dict[int, FakeWorker] = {}
        self.members: Sequence[int] = ()
        self.commands: list[StepCommand] = []
        self.files = shared if shared is not None else {}
        self.capacity = capacity
        self.faults = list(faults)
        self._loading: dict[int, int] = {}
        self._load_turns, self._loss_of = load_turns, loss_of
        self._next_unit = 0

    def staff(self, num_units: int, keep: Sequence[int]) -> None:
        while len(self.workers) + len(self._loading) < min(num_units, self.capacity):
            self._loading[self._next_unit] = self._load_turns
            self._next_unit += 1
        surplus = len(self.workers) + len(self._loading) - num_units
        spare = [u for u in (*self.workers, *self._loading) if u not in keep]
        if surplus > 0:
            self.discard(spare[-surplus:])

    def watch(self, timeout_s: float) -> dict[int, str]:
        lost = {}
        for unit in list(self._loading):
            if self._fault(unit, "load"):
                del self._loading[unit]
                lost[unit] = "died while loading"
                continue
            self._loading[unit] -= 1
            if self._loading[unit] <= 0:
                del self._loading[unit]
                self.workers[unit] = FakeWorker()
        return lost

    def ready(self) -> tuple[int, ...]:
        return tuple(self.workers)

    def num_loading(self) -> int:
        return len(self._loading)

    def workers_of(self, unit: int) -> tuple[int, ...]:
        return (unit,)

    def whereabouts(self, workers: Sequence[int]) -> list[dict[str, Any]]:
        return [{"worker": worker, "pid": 0, "node": ""} for worker in workers]

    def discard(self, units: Iterable[int]) -> None:
        for unit in tuple(units):
            self.workers.pop(unit, None)
            self._loading.pop(unit, None)

    def call(
        self,
        workers: Sequence[int],
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        *,
        timeout_s: float,
    ) -> Answers:
        answers = Answers()
        gone = {w for w in workers if w not in self.workers or self.workers[w].is_dead}
        assert method == "finish_save" or gone <= self.workers.keys(), "called an ended worker"
        step = arguments(workers[0])[0].step if method == "run_step" else None
        faults = [Fault(w, method) for w in gone]
        faults += [f for w in workers if w not in gone and (f := self._fault(w, method, step))]
        dead = {fault.worker for fault in faults}
        collective = method in {"join", "leave", "sync_state", "run_step"}
        early = faults[0].applied_by if faults else 0
        for rank, worker in enumerate(workers):
            reaches_end = not faults or not collective or rank < early
            if reaches_end or any(f.worker == worker and f.when == "after" for f in faults):
                result = getattr(self, f"_{method}")(worker, workers, *arguments(worker))
                if worker not in dead:
                    answers.results[worker] = result
            if worker in dead:
                answers.lost[worker] = "killed by the test"
                answers.culprits.add(worker)
            elif not reaches_end:
                answers.unblocked[worker] = "connection closed by peer"
        for worker in dead:
            if worker in self.workers:
                self.workers[worker].is_dead = True
        return answers

    def _fault(self, worker: int, method: str, step: int | None = None) -> Fault | None:
        for fault in self.faults:
            if (fault.worker, fault.method) == (worker, method) and fault.step in {None, step}:
                self.faults.remove(fault)
                return fault
        return None

    def _leave(self, worker: int, workers: Sequence[int]) -> None:
        self.workers[worker].membership = None

    def _join(
        self, worker: int, workers: Sequence[int], membership: Membership, pool: PoolShape
    ) -> int:
        self.workers[worker].membership = membership
        self.members = workers
        return self.workers[worker].applied

    def _sync_state(self, worker: int, workers: Sequence[int]) -> int:
        source = max((self.workers[w] for w in workers), key=lambda held: held.applied)
        self.workers[worker].applied = source.applied
        self.workers[worker].history = list(source.history)
        return source.applied

    def _run_step(
        self, worker: int, workers: Sequence[int], command: StepCommand, payload: list[StepPayload]
    ) -> StepResult:
        me, sent = self.workers[worker], payload[0]
        assert me.membership is not None
        assert command.generation == me.membership.generation
        assert command.step == me.applied + 1
        assert command.plan_digest == sent.plan.digest()
        assert sent.plan.pool.num_ranks == me.membership.num_ranks == len(workers)
        if worker == workers[0]:
            self.commands.append(command)
        loss = self._loss_of(sent)
        finite = loss == loss  # noqa: PLR0124  (NaN differs from itself)
        if finite:
            me.applied = command.step
            me.history.append(tuple(sent.sequence_ids.tolist()))
        return StepResult(
            step=command.step,
            generation=command.generation,
            rank=me.membership.rank,
            applied=finite,
            loss_sum=loss,
            token_count=1,
            grad_norm=1.0,
            lr=0.1,
            step_s=0.0,
            peak_bytes=0,
            nonfinite_sequences=() if finite else (int(sent.sequence_ids[0]),),
        )

    def _start_save(self, worker: int, workers: Sequence[int], folder: str) -> None:
        me = self.workers[worker]
        self.files[folder] = (me.applied, list(me.history))

    def _finish_save(self, worker: int, workers: Sequence[int]) -> tuple[ShardInfo, ...]:
        return ()

    def _verify_shards(
        self, worker: int, workers: Sequence[int], folder: str, shards: tuple[ShardInfo, ...]
    ) -> None:
        pass

    def _load_shards(
        self, worker: int, workers: Sequence[int], folder: str, names: tuple[str, ...]
    ) -> int:
        me = self.workers[worker]
        me.applied, me.history = self.files[folder][0], list(self.files[folder][1])
        return me.applied


def assert_history_is(crew: FakeCrew, ids: list[list[int]]) -> None:
    """Every member's weights have seen exactly the batches of the undisturbed run, in order."""
    alive = [w for m in crew.members if not (w := crew.workers[m]).is_dead]
    assert alive
    for worker in alive:
        assert worker.history == [tuple(batch) for batch in ids]
