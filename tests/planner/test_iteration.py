"""The iteration-time model against loops written straight from its formula."""

import numpy as np
import pytest

from planner.cost import CostModel
from planner.iteration import block_heights_s, iteration_s, rank_loads_s
from planner.plan import Plan
from planner.pool import PoolShape
from planner.presets import preset

POOL = PoolShape(num_ranks=6, token_budget=4096, stages=4, chunks=2)
LENGTHS = np.array([9000, 3000, 700, 64, 2000, 1])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(
        planner="by hand",
        pool=POOL,
        num_microbatches=4,
        lengths=LENGTHS,
        group_microbatch=np.array([0, 0, 1, 2, 2]),
        group_start=np.array([0, 4, 0, 0, 3]),
        group_size=np.array([4, 2, 6, 1, 1]),
        group_ulysses=np.array([4, 2, 2, 1, 1]),
        group_offsets=np.array([0, 1, 2, 2, 4, 6]),
        members=np.array([0, 1, 2, 3, 4, 5]),
        target_s=1.0,
    )


def load_by_hand(plan: Plan, cost: CostModel, group: int) -> float:
    table = cost.table(plan.pool)
    degree = int(np.searchsorted(table.degrees, plan.group_size[group]))
    members = plan.group_members(group)
    return sum(float(table.sequence_s(plan.lengths[[m]], degree)[0]) for m in members)


def test_rank_loads_are_those_of_the_rank_s_group(plan: Plan) -> None:
    cost = preset("dense")
    loads = rank_loads_s(plan, cost.table(POOL))
    assert loads.shape == (4, 6)
    for microbatch in range(4):
        for rank in range(6):
            group = plan.group_of_rank(microbatch, rank)
            expected = 0.0 if group is None else load_by_hand(plan, cost, group)
            assert loads[microbatch, rank] == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("coupling", ["pool", 1, 2, 4, 6, 8])
def test_iteration_is_the_formula(plan: Plan, coupling: str | int) -> None:
    cost = preset("moe")
    loads = rank_loads_s(plan, cost.table(POOL))
    size = 6 if coupling == "pool" else int(coupling)
    blocks = [loads[:, start : start + size] for start in range(0, 6, size)]
    busy = max(sum(float(row.max()) for row in block) for block in blocks)
    fixed = cost.fixed_s
    expected = busy + 4 * fixed + 3 / 2 * (fixed + float(loads.max()))
    assert iteration_s(plan, cost, coupling) == pytest.approx(expected, rel=1e-12)


def test_blocks_never_take_longer_than_the_pool(plan: Plan) -> None:
    cost = preset("dense")
    whole = iteration_s(plan, cost, "pool")
    assert all(iteration_s(plan, cost, size) <= whole for size in range(1, 9))


def test_heights_of_uneven_blocks_cover_every_rank() -> None:
    loads = np.arange(10.0).reshape(2, 5)
    assert block_heights_s(loads, 2).tolist() == [[1.0, 6.0], [3.0, 8.0], [4.0, 9.0]]


def test_an_empty_plan_takes_no_time() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    plan = Plan(
        planner="by hand", pool=POOL, num_microbatches=0, lengths=nothing,
        group_microbatch=nothing, group_start=nothing, group_size=nothing,
        group_ulysses=nothing, group_offsets=np.zeros(1, dtype=np.int64), members=nothing,
        target_s=0.0,
    )  # fmt: skip
    assert iteration_s(plan, preset("dense")) == 0.0
