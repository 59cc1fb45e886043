"""Every decision of the training thread, from what it sees."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ray.driver.decisions import (
    Fail,
    Finish,
    Limits,
    Reform,
    Save,
    Train,
    View,
    Wait,
    decide,
    membership,
    wanted_units,
)
from hydra_ray.driver.errors import NotEnoughWorkersError, TooManyFailuresError

LIMITS = Limits(min_units=2, max_units=6, max_failures=3, start_s=10.0, wait_s=60.0)
VIEW = View(
    applied=5,
    num_steps=10,
    members=(0, 1, 2, 3),
    stands=True,
    ready=(0, 1, 2, 3),
    num_loading=0,
    target=4,
    takes_some=False,
    num_failures=0,
    waited_s=0.0,
    stop=False,
    save_due=False,
)
FIRST = {"members": (), "stands": False}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Train()),
        ({"save_due": True}, Save()),
        ({"stop": True}, Finish(stopped=True)),
        ({"stop": True, "save_due": True}, Save()),
        ({"stop": True, "save_due": True, "ready": (0, 1)}, Reform((0, 1), "failure")),
        ({"stop": True, "save_due": True, "ready": (0,)}, Finish(stopped=True, is_saved=False)),
        ({"stop": True, "ready": (0, 1)}, Finish(stopped=True)),
        ({"applied": 10}, Finish(stopped=False)),
        ({"applied": 10, "save_due": True}, Save()),
        ({"applied": 10, "save_due": True, "ready": (0, 2)}, Reform((0, 2), "failure")),
        ({"target": 2}, Reform((0, 1), "shrink")),
        ({"target": 6, "ready": (0, 1, 2, 3, 7)}, Train()),
        ({"target": 6, "ready": (0, 1, 2, 3, 7, 9)}, Reform((0, 1, 2, 3, 7, 9), "grow")),
        ({"target": 9, "ready": tuple(range(9))}, Reform((0, 1, 2, 3, 4, 5), "grow")),
        ({"ready": (1, 3, 2)}, Reform((1, 2, 3), "failure")),
        ({"ready": (1, 3, 2, 8)}, Reform((1, 2, 3, 8), "failure")),
        ({"ready": (3,)}, Wait()),
        ({"stands": False}, Reform((0, 1, 2, 3), "failure")),
        ({"leaving": frozenset({1})}, Reform((0, 2, 3), "shrink")),
        ({"leaving": frozenset({1}), "ready": (0, 1, 2, 3, 4)}, Reform((0, 2, 3, 4), "replace")),
        ({"leaving": frozenset({0, 1, 2})}, Train()),
        ({"target": 1}, Reform((0, 1), "shrink")),
        ({"target": 1, "ready": (3,)}, Wait()),
        ({**FIRST, "ready": (0, 1), "num_loading": 2}, Wait()),
        ({**FIRST, "ready": (3, 1, 0, 2)}, Reform((3, 1, 0, 2), "start")),
        ({**FIRST, "ready": (0, 1), "num_loading": 2, "waited_s": 11}, Reform((0, 1), "start")),
    ],
)
def test_a_view_leads_to_one_decision(changes, expected):
    assert decide(replace(VIEW, **changes), LIMITS) == expected


def test_failures_beyond_the_limit_and_vain_waits_end_the_run():
    broken = decide(replace(VIEW, num_failures=4, last_failure="worker 1: SIGKILL"), LIMITS)
    assert isinstance(broken, Fail)
    assert isinstance(broken.error, TooManyFailuresError)
    assert "SIGKILL" in str(broken.error)
    starved = decide(replace(VIEW, ready=(3,), waited_s=60.0), LIMITS)
    assert isinstance(starved, Fail)
    assert isinstance(starved.error, NotEnoughWorkersError)
    assert "1 ready of 4" in str(starved.error)


UNITS = st.lists(st.integers(0, 12), unique=True, max_size=9).map(tuple)


@settings(deadline=None)
@given(
    members=UNITS,
    ready=UNITS,
    stands=st.booleans(),
    target=st.integers(1, 9),
    leaving=st.frozensets(st.integers(0, 12), max_size=3),
    loading=st.integers(0, 3),
)
def test_membership_keeps_stayers_in_order_and_never_takes_the_dead(
    members, ready, stands, target, leaving, loading
):
    view = replace(
        VIEW,
        members=members,
        ready=ready,
        stands=stands and bool(members),
        target=target,
        leaving=leaving,
        num_loading=loading,
    )
    units = membership(view, LIMITS)
    if units is None:
        return
    assert len(set(units)) == len(units) <= max(LIMITS.max_units, len(members))
    assert set(units) <= set(ready)
    stayers = [unit for unit in members if unit in units]
    assert list(units[: len(stayers)]) == stayers
    if view.whole and len(units) > len(members):
        assert len(units) == wanted_units(target, LIMITS)
    if units != members:
        assert len(units) >= LIMITS.min_units
