"""One call on many workers: who answered, who is lost, and who failed for good."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
)

from planner.errors import HydraError
from workers.errors import StepFailedError

ABORT_S = 5.0  # an abort shuts sockets down and returns
GRACE_S = 30.0  # more than the meeting of a generation may take: nobody can be freed from that
NODE_DIED = "died because its node has died"  # Ray's words; the error has no field that says it

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answers:
    """What came of one call on many workers, by worker id.

    A worker is in exactly one of the three. `lost` workers can no longer be trusted to be alive
    and in step; `unblocked` ones are well, but their call failed because a peer was lost.
    `culprits` are those of the lost whose own process died or raised: what they were doing may be
    why, unlike where a node was lost or a worker came back too late.
    """

    results: dict[int, Any] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    unblocked: dict[int, str] = field(default_factory=dict)
    culprits: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every worker gave a result."""
        return not self.lost and not self.unblocked


def gather(
    refs: Mapping[int, Any],
    *,
    timeout_s: float,
    grace_s: float = GRACE_S,
    unblock: Callable[[list[int]], None] | None = None,
) -> Answers:
    """Wait for one reference of each worker; never longer than `timeout_s + grace_s`.

    At the first failure `unblock` is called with the workers still busy (they may hang in a
    collective with the lost peer), which then have `grace_s` to come back.

    Args:
        refs: the object reference of each worker's call.
        timeout_s: limit of an undisturbed call; whoever is silent then is lost.
        grace_s: limit from the first failure on.
        unblock: frees workers from a collective; None where the call has none.

    Raises:
        HydraError: a worker raised one: another try would not change it.
    """
    answers, pending = Answers(), {ref: worker for worker, ref in refs.items()}
    deadline, disturbed = time.monotonic() + timeout_s, False
    first_error: tuple[int, str] | None = None
    while pending:
        for ref in _ready(list(pending), deadline - time.monotonic()):
            worker = pending.pop(ref)
            error = _take(ref, worker, answers)
            if error is not None and first_error is None:
                first_error = (worker, error)
        if time.monotonic() >= deadline:
            _give_up(pending, answers, disturbed=disturbed)
        elif not disturbed and not answers.complete:
            disturbed, deadline = True, min(deadline, time.monotonic() + grace_s)
            if unblock is not None and pending:
                unblock(list(pending.values()))
    if first_error is not None and not answers.lost:
        worker, error = first_error  # nobody died: whoever failed first is the cause
        answers.unblocked.pop(worker, None)
        answers.lost[worker] = error
        answers.culprits.add(worker)
    return answers


def settle_aborts(refs: Mapping[int, Any], answers: Answers) -> None:
    """Wait until every abort was carried out, at most `ABORT_S`.

    One that arrived after its worker had entered the next generation would break that one; so a
    worker that does not confirm is lost, and its process is ended before the next is formed.
    """
    if not refs:
        return
    confirmed, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=ABORT_S)
    for worker, ref in refs.items():
        if ref not in confirmed and worker not in answers.lost:
            answers.results.pop(worker, None)
            answers.unblocked.pop(worker, None)
            answers.lost[worker] = f"did not confirm an abort within {ABORT_S:g} s"


def _ready(refs: list[Any], timeout_s: float) -> list[Any]:
    """Every reference that has an outcome, after waiting for at least one."""
    done: list[Any]
    done, rest = ray.wait(refs, num_returns=1, timeout=max(0.0, timeout_s))
    if done and rest:
        more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
        done += more
    return done


def _take(ref: Any, worker: int, answers: Answers) -> str | None:
    """Put one outcome where it belongs; returns the text of an error the worker raised."""
    try:
        answers.results[worker] = ray.get(ref, timeout=30)
    except GetTimeoutError:
        answers.lost[worker] = "its result could not be fetched within 30 s"
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, HydraError) and not isinstance(cause, StepFailedError):
            raise cause from None
        log.warning("worker %d failed: %s", worker, error)
        answers.unblocked[worker] = f"{type(cause).__name__}: {_first_line(cause)}"
        return answers.unblocked[worker]
    except RayError as error:  # the process or its node died, or Ray could not start or reach it
        answers.lost[worker] = f"{type(error).__name__}: {_first_line(error)}"
        if _process_died(error):
            answers.culprits.add(worker)
    return None


def _process_died(error: RayError) -> bool:
    """Whether the worker's own process ended while its node lived on."""
    died = isinstance(error, ActorDiedError | OutOfMemoryError)
    return died and NODE_DIED not in str(error) and not getattr(error, "preempted", False)


def _give_up(pending: dict[Any, int], answers: Answers, *, disturbed: bool) -> None:
    cause = "did not come back after a peer was lost" if disturbed else "did not answer in time"
    for worker in pending.values():
        answers.lost[worker] = cause
    pending.clear()


def _first_line(error: object) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message")
