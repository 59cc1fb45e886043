"""The lower bound and the exact optimum, held against each other and against a brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.bound import lower_bound
from planner.cost import CostModel
from planner.errors import InfeasibleError
from planner.exact import exact_iteration_s
from planner.iteration import bubble_weight
from planner.pool import PoolShape
from planner.presets import PRESETS, preset

pools = st.builds(
    PoolShape,
    num_ranks=st.integers(1, 6),
    token_budget=st.sampled_from([4096, 8192]),
    stages=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2]),
)
few_lengths = st.lists(st.integers(1, 4096) | st.integers(1, 24_000), min_size=1, max_size=6)


def fit(lengths: list[int], pool: PoolShape) -> np.ndarray:
    return np.minimum(np.array(lengths), pool.longest_sequence)


@settings(max_examples=150, deadline=None)
@given(few_lengths, pools, st.sampled_from(sorted(PRESETS)))
def test_bound_is_no_more_than_the_optimum(lengths: list[int], pool: PoolShape, name: str) -> None:
    batch, cost = fit(lengths, pool), preset(name)
    assert lower_bound(batch, pool, cost) <= exact_iteration_s(batch, pool, cost) * (1 + 1e-12)


def brute_force_s(lengths: np.ndarray, pool: PoolShape, cost: CostModel) -> float:
    """Every sequence to every (MB, degree, group number), all combinations, no pruning."""
    table, best = cost.table(pool), np.inf
    for num_microbatches in range(1, len(lengths) + 1):
        if num_microbatches != pool.legal_num_microbatches(num_microbatches):
            continue
        slots = list(product(range(num_microbatches), range(len(table.degrees)), range(2)))
        for choice in product(slots, repeat=len(lengths)):
            best = min(best, _time_s(lengths, choice, num_microbatches, pool, cost))
    return best


def _time_s(lengths, choice, num_microbatches, pool, cost) -> float:
    table = cost.table(pool)
    heights = np.zeros(num_microbatches)
    widths = np.zeros(num_microbatches)
    for slot in set(choice):
        microbatch, degree, _ = slot
        members = lengths[[i for i, at in enumerate(choice) if at == slot]]
        size = pool.degrees[degree]
        if sum(pool.padded(int(s), size) for s in members) > pool.token_budget * size:
            return np.inf
        widths[microbatch] += size
        load = float(table.sequence_s(members, degree).sum())
        heights[microbatch] = max(heights[microbatch], load)
    if widths.max() > pool.num_ranks:
        return np.inf
    bubble = bubble_weight(pool)
    fixed = (num_microbatches + bubble) * table.fixed_s
    return float(heights.sum() + bubble * heights.max() + fixed)


@pytest.mark.parametrize("seed", range(4))
def test_exact_is_the_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = PoolShape(num_ranks=int(rng.integers(1, 4)), token_budget=8192, stages=3)
    lengths = np.minimum(rng.integers(1, 12_000, 3), pool.longest_sequence)
    cost = preset("moe")
    expected = brute_force_s(lengths, pool, cost)
    assert exact_iteration_s(lengths, pool, cost) == pytest.approx(expected, rel=1e-12)


def test_bound_is_met_where_perfect_balance_exists() -> None:
    pool = PoolShape(num_ranks=4, token_budget=8192)
    lengths, cost = np.full(32, 4096), preset("dense")
    load = 2 * float(cost.table(pool).sequence_s(lengths[:1], 0)[0])
    expected = 4 * (load + cost.fixed_s)
    assert lower_bound(lengths, pool, cost) == pytest.approx(expected, rel=1e-12)


def test_a_higher_budget_or_more_ranks_never_raise_the_bound() -> None:
    lengths = np.random.default_rng(5).integers(1, 30_000, 200)
    cost = preset("dense")
    times = [
        lower_bound(lengths, PoolShape(num_ranks=ranks, token_budget=budget), cost)
        for ranks, budget in ((8, 4096), (8, 8192), (16, 8192), (32, 8192))
    ]
    assert times == sorted(times, reverse=True)


def test_bound_of_nothing_is_zero() -> None:
    pool = PoolShape(num_ranks=4, token_budget=8192)
    assert lower_bound(np.zeros(0, dtype=np.int64), pool, preset("dense")) == 0.0
    assert exact_iteration_s(np.zeros(0, dtype=np.int64), pool, preset("dense")) == 0.0


def test_a_sequence_that_fits_nowhere_is_an_error_with_its_limit() -> None:
    pool = PoolShape(num_ranks=2, token_budget=1024)
    with pytest.raises(InfeasibleError, match=r"2049 tokens.*limit 2048 tokens"):
        lower_bound(np.array([10, 2049]), pool, preset("dense"))
