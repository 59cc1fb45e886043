"""The closed-form targets, against the iteration model they are derived from."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import CostModel
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.targets import NEAR_MISS, SMALLEST_SHARD_TOKENS, closed_form_targets


def modelled_s(load, lengths, pool, cost):
    """(a L + t0) (M + (p - 1) / v), with M what the target and the budget ask for."""
    work, tokens = float(np.sum(np.square(lengths, dtype=float))), int(lengths.sum())
    fewest = math.ceil(tokens / (pool.num_ranks * pool.token_budget))
    count = max(work / (pool.num_ranks * load), pool.legal_num_microbatches(fewest))
    microbatch_s = cost.quadratic_s * load + cost.fixed_s
    return microbatch_s * (count + (pool.stages - 1) / pool.chunks)


@given(
    lengths=st.lists(st.integers(1_000, 60_000), min_size=1, max_size=40).map(np.array),
    num_ranks=st.sampled_from((8, 16, 64)),
    fixed_s=st.sampled_from((1e-4, 5.8e-3, 0.1)),
    stages=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_cap_is_the_best_cap_rounded_down(lengths, num_ranks, fixed_s, stages):
    pool = PoolShape(num_ranks=num_ranks, token_budget=8192, stages=stages)
    cost = CostModel(fixed_s=fixed_s)
    longest = int(lengths.max())
    targets = closed_form_targets(lengths, pool, cost)
    usable = [k for k in pool.degrees if k * 8192 >= pool.padded(longest, k)]
    usable = [k for k in usable if k == usable[0] or k * SMALLEST_SHARD_TOKENS <= longest]
    caps = np.geomspace(usable[0], usable[-1], 2_000)
    times = [modelled_s(longest**2 / cap, lengths, pool, cost) for cap in caps]
    best = float(caps[int(np.argmin(times))])
    grid = 1.01  # the model is flat at its minimum, and the grid has steps
    assert targets.cap <= max(usable[0], NEAR_MISS * best * grid)
    wider = [k for k in usable if k > targets.cap]
    assert not wider or wider[0] >= NEAR_MISS * best / grid


def test_a_longer_pipeline_asks_for_a_higher_cap():
    lengths, cost = np.full(8, 262_144), CostModel(fixed_s=1.0)
    pools = [PoolShape(num_ranks=512, token_budget=8192, stages=p) for p in (1, 2, 8, 32)]
    caps = [closed_form_targets(lengths, pool, cost).cap for pool in pools]
    assert caps == [64, 64, 64, 256]


def test_cap_holds_the_longest_sequence_and_meets_the_target():
    lengths = np.array([100_000, 500])
    targets = closed_form_targets(lengths, PoolShape(num_ranks=64, token_budget=8192), DENSE)
    assert targets.cap >= 16
    assert targets.load == 100_000**2 / targets.cap


def test_short_sequences_fill_their_ranks():
    """A target of one sequence a rank would need 800 microbatches where tokens need 29."""
    lengths = np.full(100_000, 300)
    pool = PoolShape(num_ranks=128, token_budget=8192, stages=4, chunks=2)
    targets = closed_form_targets(lengths, pool, DENSE)
    assert targets.num_microbatches == 32
    assert targets.load > 20 * 300**2


def test_two_sequences_alone_take_all_ranks():
    pool = PoolShape(num_ranks=8, token_budget=65_536)
    assert closed_form_targets(np.array([30_000, 30_000]), pool, DENSE).cap == 4
