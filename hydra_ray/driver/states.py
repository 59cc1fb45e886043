"""What a run is doing, and which state may follow which."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class RunState(StrEnum):
    """The states of a run; `TRANSITIONS` says which may follow which."""

    STARTING = "starting"
    RUNNING = "running"
    RESIZING = "resizing"
    RECOVERING = "recovering"
    WAITING = "waiting"
    SAVING = "saving"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


_ENDS = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
_CHANGING = frozenset({RunState.RESIZING, RunState.RECOVERING, RunState.WAITING})
_WORKING = frozenset({RunState.RUNNING, RunState.SAVING})

TRANSITIONS: Mapping[RunState, frozenset[RunState]] = MappingProxyType(
    {
        RunState.STARTING: _ENDS | _WORKING | _CHANGING,
        RunState.RUNNING: _ENDS | _CHANGING | {RunState.SAVING},
        RunState.RESIZING: _ENDS | _WORKING | {RunState.RECOVERING, RunState.WAITING},
        RunState.RECOVERING: _ENDS | _WORKING | {RunState.RESIZING, RunState.WAITING},
        RunState.WAITING: _ENDS | {RunState.RECOVERING},
        RunState.SAVING: _ENDS | _CHANGING | {RunState.RUNNING},
        RunState.FINISHED: frozenset(),
        RunState.STOPPED: frozenset(),
        RunState.FAILED: frozenset(),
    }
)
"""Legal next states. A state may also be kept; an end state is kept for ever."""

FINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
"""The states no run leaves."""


class IllegalTransitionError(RuntimeError):
    """The driver tried a transition that the table does not hold: a defect of this project."""

    def __init__(self, current: RunState, following: RunState) -> None:
        super().__init__(f"a run cannot go from {current} to {following}")


def advance(current: RunState, following: RunState) -> RunState:
    """Return `following` if it may come after `current`.

    Raises:
        IllegalTransitionError: the table holds no such edge.
    """
    if following != current and following not in TRANSITIONS[current]:
        raise IllegalTransitionError(current, following)
    return following
