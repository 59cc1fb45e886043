"""Fitted costs explain what they were measured on."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.cost import CostModel
from planner.errors import InputError
from planner.fit import fit, group_features
from planner.hydra import hydra
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.summary import summarize

RNG = np.random.default_rng(0)
SQUARES, TOKENS = RNG.uniform(1e6, 1e9, 50), RNG.uniform(100, 8192, 50)


@given(
    quadratic=st.sampled_from((0.0, 4e-10, 1e-8)),
    linear=st.sampled_from((0.0, 1.5e-5)),
    fixed=st.sampled_from((1e-4, 5e-3)),
)
@settings(deadline=None)
def test_exact_measurements_give_the_coefficients_back(quadratic, linear, fixed):
    assume(quadratic + linear > 0)
    seconds = quadratic * SQUARES + linear * TOKENS + fixed
    found = fit(DENSE, SQUARES, TOKENS, seconds)
    assert found.quadratic_s == pytest.approx(quadratic, rel=1e-6, abs=1e-17)
    assert found.linear_s == pytest.approx(linear, rel=1e-6, abs=1e-12)
    assert found.fixed_s == pytest.approx(fixed, rel=1e-6)


def test_noise_never_makes_a_cost_negative():
    noisy = (4e-10 * SQUARES + 1e-9 * TOKENS) * RNG.uniform(0.9, 1.1, 50)
    found = fit(DENSE, SQUARES, TOKENS, noisy)
    assert min(found.linear_s, found.fixed_s) >= 0
    assert found.quadratic_s == pytest.approx(4e-10, rel=0.1)


def test_what_is_not_fitted_stays():
    base = CostModel(exposed_alltoall=0.5)
    found = fit(base, SQUARES, TOKENS, 1e-9 * SQUARES)
    assert (found.exposed_alltoall, found.attention) == (0.5, base.attention)


@pytest.mark.parametrize(
    ("squares", "tokens", "seconds"),
    [([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]), ([1.0] * 4, [1.0] * 3, [1.0] * 4)],
)
def test_too_few_measurements_are_refused(squares, tokens, seconds):
    with pytest.raises(InputError, match="as many"):
        fit(DENSE, squares, tokens, seconds)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_measurements_that_are_no_times_are_refused(bad):
    with pytest.raises(InputError, match="not a finite number"):
        fit(DENSE, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, bad])


def test_group_features_add_up_to_the_batch():
    lengths = np.array([3000, 900, 900, 40, 7])
    plan = hydra().plan(lengths, PoolShape(num_ranks=4, token_budget=1024), DENSE)
    squares, tokens = group_features(plan)
    assert (squares * plan.group_size).sum() == np.square(lengths).sum()
    padding = summarize(plan, DENSE).tokens_padding
    assert (tokens * plan.group_size).sum() == lengths.sum() + padding


def test_summary_counts_every_rank_slot():
    plan = hydra().plan(np.array([512, 130]), PoolShape(num_ranks=8, token_budget=1024), DENSE)
    summary = summarize(plan, DENSE)
    used = sum(summary.ranks_of_degree.values())
    assert used + summary.idle_slots == 8 * summary.num_microbatches
    assert summary.bound_ratio >= 1
    assert summary.imbalance >= 1
