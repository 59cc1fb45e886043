"""What every planner behind the interface promises: valid plans, same bytes, typed refusals."""

import numpy as np
import pytest
from hypothesis import given, settings

from planner.errors import InfeasibleError, InputError
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.registry import get_planner, planner_names
from planner.validate import validate

from .batches import COSTS, pools_with_batches

# The first test that plans compiles: seconds on an idle machine, minutes on a crowded one.
pytestmark = pytest.mark.timeout(600)

POOL = PoolShape(num_ranks=8, token_budget=1024)


@pytest.fixture(params=planner_names())
def planner(request):
    return get_planner(request.param)


@given(case=pools_with_batches(most=60), cost=COSTS)
@settings(max_examples=150, deadline=None)
def test_plans_are_valid_and_the_same_every_time(case, cost):
    pool, lengths = case
    for name in planner_names():
        plan = get_planner(name).plan(lengths, pool, cost)
        validate(plan)
        assert plan.planner == name
        assert plan.digest() == get_planner(name).plan(lengths.copy(), pool, cost).digest()


def test_no_sequences_need_no_microbatches(planner):
    plan = planner.plan(np.zeros(0, dtype=np.int64), POOL, DENSE)
    validate(plan)
    assert plan.num_microbatches == 0


def test_a_plan_does_not_change_with_its_callers_array(planner):
    lengths = np.array([3000, 20, 700])
    plan = planner.plan(lengths, POOL, DENSE)
    digest = plan.digest()
    lengths[:] = 1
    assert plan.digest() == digest
    with pytest.raises(ValueError, match="read-only"):
        plan.members[0] = 1


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64])
def test_any_whole_dtype_will_do(planner, dtype):
    lengths = np.array([3000, 20, 20, 700], dtype=dtype)
    validate(planner.plan(lengths, POOL, DENSE))


@pytest.mark.parametrize(
    ("lengths", "what"),
    [
        (np.array([5, 0, 7]), "place 1 has no tokens"),
        (np.array([5, 7, -3]), "place 2 has no tokens"),
        (np.array([5.0, 7.0]), "whole numbers"),
        (np.array([True, False]), "whole numbers"),
        (np.array(["5"]), "whole numbers"),
        (np.array([[5, 7]]), "one axis"),
    ],
)
def test_bad_lengths_are_refused(planner, lengths, what):
    with pytest.raises(InputError, match=what):
        planner.plan(lengths, POOL, DENSE)


def test_a_sequence_no_pool_holds_is_named_with_limit_and_remedy(planner):
    with pytest.raises(InfeasibleError) as caught:
        planner.plan(np.array([5, 8193]), POOL, DENSE)
    error = caught.value
    assert "place 1" in error.what
    assert error.value == "8193 tokens"
    assert error.limit == "8192 tokens"
    enough = int(error.remedy.rstrip(".").split()[-1])
    roomier = PoolShape(num_ranks=8, token_budget=enough)
    validate(planner.plan(np.array([5, 8193]), roomier, DENSE))


def test_the_longest_sequence_that_fits_is_placed(planner):
    plan = planner.plan(np.array([POOL.longest_sequence, 3]), POOL, DENSE)
    validate(plan)
    assert plan.group_size.max() == 8


@pytest.mark.parametrize(
    "field", ["num_ranks", "token_budget", "stages", "chunks", "pad_unit", "max_degree"]
)
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_bad_pools_are_refused(field, value):
    fields = {"num_ranks": 4, "token_budget": 64, field: value}
    with pytest.raises(InputError, match=field):
        PoolShape(**fields)


def test_an_unknown_planner_suggests_the_nearest():
    with pytest.raises(InputError, match="Did you mean hydra"):
        get_planner("hydar")
