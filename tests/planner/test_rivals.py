"""Static context parallelism and Megatron's planner do what their descriptions say."""

import numpy as np

from planner.mcore_v2 import McoreV2Planner
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.static import StaticPlanner
from planner.validate import validate


def groups_of(plan):
    return [
        (int(mb), int(start), int(size), plan.group_members(g).tolist())
        for g, (mb, start, size) in enumerate(
            zip(plan.group_microbatch, plan.group_start, plan.group_size, strict=True)
        )
    ]


def test_static_packs_next_fit_in_batch_order():
    pool = PoolShape(num_ranks=4, token_budget=100)
    plan = StaticPlanner().plan(np.array([150, 40, 60, 120, 80, 10]), pool, DENSE)
    # Two replicas of CP 2 hold 200 tokens each; 120 does not fit behind 150 + 40.
    assert groups_of(plan) == [
        (0, 0, 2, [0, 1]),
        (0, 2, 2, [2, 3]),
        (1, 0, 2, [4]),
        (1, 2, 2, [5]),
    ]


def test_static_takes_the_least_degree_that_divides_the_pool():
    plan = StaticPlanner().plan(np.array([350]), PoolShape(num_ranks=6, token_budget=100), DENSE)
    assert plan.group_size.tolist() == [6]


def test_static_gives_every_replica_a_pack_in_a_legal_number_of_microbatches():
    pool = PoolShape(num_ranks=2, token_budget=100, stages=3, chunks=2)
    plan = StaticPlanner().plan(np.full(10, 50), pool, DENSE)
    validate(plan)
    assert plan.num_microbatches == 3
    assert plan.num_groups == 6


def test_mcore_sizes_by_memory_and_fills_free_ranks_first():
    pool = PoolShape(num_ranks=4, token_budget=4096)
    lengths = np.array([16384, 8192, 4096, 4096, 2000, 1500, 900, 300])
    plan = McoreV2Planner().plan(lengths, pool, DENSE)
    validate(plan)
    assert groups_of(plan)[0] == (0, 0, 4, [0])
    assert groups_of(plan)[1] == (1, 0, 2, [1])


def test_mcore_doubles_the_first_smallest_group_into_idle_ranks():
    plan = McoreV2Planner().plan(np.array([100]), PoolShape(num_ranks=6, token_budget=64), DENSE)
    assert plan.group_size.tolist() == [6]


def test_mcore_halves_its_last_microbatches_for_the_pipeline():
    pool = PoolShape(num_ranks=4, token_budget=64, stages=3, chunks=2)
    plan = McoreV2Planner().plan(np.full(8, 60), pool, DENSE)
    validate(plan)
    assert plan.num_microbatches == 3
    assert np.bincount(plan.group_microbatch).tolist() == [4, 2, 2]
    assert plan.group_size[plan.group_microbatch > 0].tolist() == [2, 2, 2, 2]
