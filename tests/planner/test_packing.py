"""The heap version makes the scan's plan to the byte, and both keep every invariant."""

import numpy as np
import pytest
from hypothesis import given, settings

from planner.hydra import hydra, hydra_scan
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.targets import SMALLEST_SHARD_TOKENS
from planner.validate import validate

from .batches import COSTS, pools_with_batches


def assert_same_bytes(case, cost):
    pool, lengths = case
    by_heap = hydra().plan(lengths, pool, cost)
    by_scan = hydra_scan().plan(lengths, pool, cost)
    validate(by_heap)
    assert by_heap.digest() == by_scan.digest()


@given(case=pools_with_batches(), cost=COSTS)
@settings(max_examples=300, deadline=None)
def test_heaps_make_the_scans_plan(case, cost):
    assert_same_bytes(case, cost)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(case=pools_with_batches(most=300), cost=COSTS)
@settings(max_examples=10_000, deadline=None)
def test_heaps_make_the_scans_plan_in_ten_thousand_cases(case, cost):
    assert_same_bytes(case, cost)


@pytest.mark.parametrize("num_ranks", [*range(1, 65), 100, 128, 257])
def test_heaps_make_the_scans_plan_at_every_pool_size(num_ranks):
    lengths = (np.random.default_rng(num_ranks).lognormal(6, 1.8, 150)).astype(np.int64) + 1
    pool = PoolShape(num_ranks=num_ranks, token_budget=4096, stages=3, chunks=2)
    assert_same_bytes((pool, np.minimum(lengths, pool.longest_sequence)), DENSE)


def test_short_sequences_piggyback_on_wide_groups():
    """Two long sequences take all ranks; eight short ones share them in the same microbatch."""
    pool = PoolShape(num_ranks=8, token_budget=1700)
    plan = hydra().plan(np.array([500] * 8 + [4000] * 2), pool, DENSE)
    assert plan.num_microbatches == 1
    assert plan.group_size.tolist() == [4, 4]
    assert np.diff(plan.group_offsets).tolist() == [5, 5]


def test_idle_ranks_are_given_to_groups_that_can_be_cut():
    pool = PoolShape(num_ranks=8, token_budget=4096)
    plan = hydra().plan(np.array([4096, 4096, 4096]), pool, DENSE)
    assert plan.group_size.sum() == 8


def test_idle_ranks_stay_idle_rather_than_cut_shards_uselessly_thin():
    pool = PoolShape(num_ranks=8, token_budget=4096)
    plan = hydra().plan(np.array([2 * SMALLEST_SHARD_TOKENS]), pool, DENSE)
    assert plan.group_size.tolist() == [2]


@pytest.mark.parametrize("num_sequences", [2, 3, 5, 40])
def test_microbatches_are_halved_until_the_pipeline_takes_their_number(num_sequences):
    pool = PoolShape(num_ranks=2, token_budget=1024, stages=4, chunks=2)
    plan = hydra().plan(np.full(num_sequences, 1000), pool, DENSE)
    validate(plan)
    used = len(np.unique(plan.group_microbatch))
    assert plan.num_microbatches % 4 == 0
    assert used == min(num_sequences, plan.num_microbatches)


def test_no_sequences_make_an_empty_plan():
    plan = hydra().plan(np.array([], dtype=np.int64), PoolShape(num_ranks=4, token_budget=8), DENSE)
    validate(plan)
    assert (plan.num_microbatches, plan.num_groups, plan.num_sequences) == (0, 0, 0)


def test_equal_lengths_do_not_rescan_what_was_refused():
    """Each refusal skips its whole run: 100,000 equal sequences in 700 microbatches."""
    pool = PoolShape(num_ranks=16, token_budget=8192)
    plan = hydra().plan(np.full(100_000, 900), pool, DENSE)
    validate(plan)
    assert plan.num_microbatches == -(-100_000 // (16 * 9))
