"""What the training thread does next: pure functions from what is known to one decision.

The loop shows its `View` at every step boundary and carries out the decision it gets back, so
that start, resume, growth, shrinking and failure are all told apart here and nowhere else.
"""

from dataclasses import dataclass
from typing import Literal

from hydra_ray.driver.errors import NotEnoughWorkersError, TooManyFailuresError
from planner.errors import HydraError

Cause = Literal["start", "grow", "shrink", "replace", "failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The recipe's bounds on membership, in scale units, and on patience, in seconds."""

    min_units: int
    max_units: int
    max_failures: int
    start_s: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the training thread knows at a step boundary.

    Args:
        applied: the last step the pool applied.
        num_steps: the step to end at.
        members: the units of the latest generation by rank; () before the first.
        stands: whether that generation is complete and nothing broke it since.
        ready: the units that are loaded and alive, in order of arrival.
        leaving: units that are to leave the pool for good (a drained node).
        num_loading: units that are starting.
        target: the units wanted.
        takes_some: whether units join that are too few for the target.
        num_failures: worker failures within the window that counts.
        waited_s: how long the run has stood still for want of workers.
        stop: whether the user asked to stop.
        save_due: whether a checkpoint of `applied` is wanted now.
        last_failure: how the latest failure reads, for the error that ends the run.
    """

    applied: int
    num_steps: int
    members: tuple[int, ...]
    stands: bool
    ready: tuple[int, ...]
    leaving: frozenset[int] = frozenset()
    num_loading: int
    target: int
    takes_some: bool
    num_failures: int
    waited_s: float
    stop: bool
    save_due: bool
    last_failure: str = ""

    @property
    def whole(self) -> bool:
        """Whether a generation stands and every member of it is alive."""
        return self.stands and set(self.members) <= set(self.ready)


@dataclass(frozen=True, slots=True)
class Train:
    """Train the next step."""


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint of the last applied step."""


@dataclass(frozen=True, slots=True)
class Reform:
    """Form a new generation of these units, in rank order."""

    units: tuple[int, ...]
    cause: Cause


@dataclass(frozen=True, slots=True)
class Wait:
    """Stand still until workers arrive."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End well: all steps are done, or the user asked to stop.

    `is_saved` is False where too few workers are left to write the checkpoint that was due.
    """

    stopped: bool
    is_saved: bool = True


@dataclass(frozen=True, slots=True)
class Fail:
    """End with an error."""

    error: HydraError


Decision = Train | Save | Reform | Wait | Finish | Fail


def decide(view: View, limits: Limits) -> Decision:
    """Choose the next act. O(units)."""
    if view.num_failures > limits.max_failures:
        return Fail(_too_many_failures(view, limits))
    if view.whole and view.save_due:
        return Save()
    if not view.save_due and (view.stop or view.applied >= view.num_steps):
        return Finish(stopped=view.stop)
    units = membership(view, limits)
    if units is None:
        return Finish(stopped=True, is_saved=False) if view.stop else _wait_or_fail(view, limits)
    if units != view.members or not view.stands:
        return Reform(units, _cause(view, units))
    return Train()


def wanted_units(target: int, limits: Limits) -> int:
    """The units to have: the target, within the bounds. Fewer than the minimum cannot train."""
    return max(limits.min_units, min(target, limits.max_units))


def membership(view: View, limits: Limits) -> tuple[int, ...] | None:
    """The units the pool should now have, in rank order, or None while it must wait.

    Members that live keep their order at the front, so their processes and state stay. A whole
    generation grows to what a `scale` asks for or not at all, but takes back what it lost piece
    by piece; a broken one goes on with what is ready, from the minimum up; the first one waits
    for its target for as long as a start may take.
    """
    wanted, enough = wanted_units(view.target, limits), limits.min_units
    staying, spare = _candidates(view)
    if view.whole:
        if len(staying) + len(spare) < wanted and not view.takes_some:
            spare = ()
        units = (*staying, *spare)[:wanted]
        return units if len(units) >= enough else view.members
    patient = not view.members and view.num_loading > 0 and view.waited_s < limits.start_s
    units = (*staying, *spare)[:wanted]
    return units if len(units) >= (wanted if patient else enough) else None


def _candidates(view: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The members that live and stay, in rank order, and the spare units, in order of arrival."""
    usable = [unit for unit in view.ready if unit not in view.leaving]
    staying = tuple(unit for unit in view.members if unit in usable)
    return staying, tuple(unit for unit in usable if unit not in staying)


def _cause(view: View, units: tuple[int, ...]) -> Cause:
    if not view.members:
        return "start"
    if not view.whole:
        return "failure"
    if len(units) == len(view.members):
        return "replace"
    return "grow" if len(units) > len(view.members) else "shrink"


def _wait_or_fail(view: View, limits: Limits) -> Wait | Fail:
    patience_s = limits.wait_s if view.members else limits.start_s
    if view.waited_s < patience_s:
        return Wait()
    return Fail(
        NotEnoughWorkersError(
            f"the run has too few workers and waited {view.waited_s:.0f} s for more",
            value=f"{len(view.ready)} ready of {view.target} scale units wanted",
            limit=f">= {limits.min_units}",
            remedy="Add nodes or lower the number of workers; "
            "then continue with --resume." + _because(view),
        )
    )


def _too_many_failures(view: View, limits: Limits) -> TooManyFailuresError:
    return TooManyFailuresError(
        "workers failed too often",
        value=f"{view.num_failures} failures",
        limit=f"elastic.max_failures = {limits.max_failures}",
        remedy="See events.jsonl for their causes; then continue with --resume." + _because(view),
    )


def _because(view: View) -> str:
    return f" The latest: {view.last_failure}" if view.last_failure else ""
