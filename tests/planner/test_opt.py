"""hydra-opt: never worse than the paper's planner, close to the optimum and to the bound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lengths import draw_batch
from planner.bound import lower_bound
from planner.exact import exact_iteration_s
from planner.hydra import hydra
from planner.iteration import block_heights_s, iteration_s, rank_loads_s
from planner.opt.entry import fill_in, grow, make_draft, price
from planner.opt.planner import HydraOptPlanner, best_draft, priced
from planner.opt.search import find_targets
from planner.opt.task import make_task
from planner.pool import PoolShape
from planner.presets import PRESETS, preset
from planner.validate import validate

from .batches import COSTS, pools_with_batches

# The first test that plans compiles: seconds on an idle machine, minutes on a crowded one.
pytestmark = pytest.mark.timeout(600)

OPT, HYDRA = HydraOptPlanner(), hydra()
ROUNDING = 1 + 1e-12


def times_s(lengths, pool, cost, coupling="pool"):
    """Iteration of hydra-opt's valid plan, and of hydra's."""
    plan = OPT.plan(lengths, pool, cost)
    validate(plan)
    return iteration_s(plan, cost, coupling), iteration_s(
        HYDRA.plan(lengths, pool, cost), cost, coupling
    )


@settings(max_examples=200, deadline=None)
@given(case=pools_with_batches(), cost=COSTS)
def test_never_worse_than_hydra(case, cost):
    pool, lengths = case
    ours, papers = times_s(lengths, pool, cost)
    assert ours <= papers


@settings(max_examples=60, deadline=None)
@given(case=pools_with_batches(), cost=COSTS, block=st.integers(2, 16))
def test_never_worse_than_hydra_in_blocks(case, cost, block):
    pool, lengths = case
    ours, papers = times_s(lengths, replace(pool, expert_ranks=block), cost, block)
    assert ours <= papers


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 2048) | st.integers(1, 40_000), min_size=1, max_size=7),
    pool=st.builds(
        PoolShape,
        num_ranks=st.integers(1, 6),
        token_budget=st.sampled_from([4096, 8192]),
        stages=st.sampled_from([1, 2, 4]),
        chunks=st.sampled_from([1, 2]),
    ),
    name=st.sampled_from(sorted(PRESETS)),
)
def test_bound_exact_ours_hydra_in_this_order(lengths, pool, name):
    batch, cost = np.minimum(np.array(lengths), pool.longest_sequence), preset(name)
    ours, papers = times_s(batch, pool, cost)
    exact = exact_iteration_s(batch, pool, cost, at_most_s=ours * ROUNDING)
    assert lower_bound(batch, pool, cost) <= exact * ROUNDING
    assert exact <= ours * ROUNDING
    assert ours <= papers
    assert ours <= 1.05 * exact


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize(
    ("context", "budget", "worst"), [(262_144, 8_192, 1.03), (32_768, 4_096, 1.015)]
)
def test_real_lengths_are_planned_close_to_the_bound(name, context, budget, worst):
    pool = PoolShape(num_ranks=128, token_budget=budget, stages=4, chunks=2)
    cost = preset(name)
    for seed in range(3):
        lengths = draw_batch(4 << 20, context, seed)
        ours, _ = times_s(lengths, pool, cost)
        assert ours <= worst * lower_bound(lengths, pool, cost)


@pytest.mark.parametrize(
    ("context", "budget", "worst"), [(262_144, 8_192, 1.025), (32_768, 4_096, 1.015)]
)
def test_large_pools_are_searched_on_a_sample_and_planned_as_close(context, budget, worst):
    pool = PoolShape(num_ranks=4_096, token_budget=budget, stages=4, chunks=2)
    lengths = draw_batch(256 << 20, context, seed=1)
    ours, _ = times_s(lengths, pool, preset("dense"))
    assert ours <= worst * lower_bound(lengths, pool, preset("dense"))


def full(share):
    """A batch that fills so much of 8 microbatches of 16 ranks of 8192 tokens."""
    return draw_batch(int(share * 8 * 16 * 8_192), 32_768, seed=3)


@pytest.mark.parametrize(
    ("what", "num_ranks", "lengths", "worst"),
    [
        ("all short", 128, np.full(100_000, 300), 1.01),
        ("all short, few ranks", 8, np.full(1_000, 300), 1.02),
        (
            "fewer sequences than ranks",
            128,
            np.random.default_rng(0).integers(100, 8_000, 60),
            1.05,
        ),
        ("97% full", 16, full(0.97), 1.05),
        ("99% full", 16, full(0.99), 1.05),
        ("one giant", 128, np.array([1_048_576]), 1.0001),
        ("all longest", 128, np.full(40, 1_048_576), 1.0001),
        ("all equal to the budget", 128, np.full(4_096, 8_192), 1.01),
        ("odd pool", 6, draw_batch(6 * 65_536, 32_768, seed=0), 1.05),
        ("one rank", 1, draw_batch(65_536, 8_192, seed=0), 1.01),
    ],
)
def test_hard_shapes_are_planned_close_to_the_bound(what, num_ranks, lengths, worst):
    pool = PoolShape(num_ranks=num_ranks, token_budget=8_192, stages=4, chunks=2)
    cost = preset("dense")
    ours, papers = times_s(lengths, pool, cost)
    assert ours <= papers
    assert ours <= worst * lower_bound(lengths, pool, cost)


@pytest.fixture(scope="module")
def real():
    """Pool, table and task of a real batch."""
    pool = PoolShape(num_ranks=128, token_budget=8_192, stages=4, chunks=2)
    table = preset("moe").table(pool)
    ordered = -np.sort(-draw_batch(4 << 20, 262_144, seed=11))
    return pool, table, fill_in(make_task(ordered, pool, table))


def test_estimates_are_what_plans_turn_out_to_be(real):
    _, table, task = real
    found = find_targets(task, table)
    assert (np.diff(found.estimate_s) >= 0).all()
    for target, count, estimate_s in list(zip(*found, strict=True))[:5]:
        draft = make_draft(task, target, count)
        assert draft.iteration_s == pytest.approx(estimate_s, rel=5e-3)


def test_a_draft_costs_what_its_plan_costs(real):
    pool, table, task = real
    packing, target = HYDRA.packed(task.lengths, pool, preset("moe"))
    paper = priced(packing, target, task)
    plan = HYDRA.plan(task.lengths, pool, preset("moe"))
    assert paper.iteration_s == pytest.approx(iteration_s(plan, preset("moe")), rel=1e-12)
    ours = OPT.plan(task.lengths, pool, preset("moe"))
    best = best_draft(paper, task, table)
    assert best.iteration_s == pytest.approx(iteration_s(ours, preset("moe")), rel=1e-12)


def test_heavy_microbatches_come_first(real):
    pool, table, task = real
    plan = OPT.plan(task.lengths, pool, preset("moe"))
    heights = block_heights_s(rank_loads_s(plan, table), "pool")[0]
    assert (np.diff(heights) <= 0).all()


def test_growing_leaves_ranks_idle_that_would_not_help():
    pool = PoolShape(num_ranks=8, token_budget=8_192)
    task = fill_in(
        make_task(np.array([8_000, 8_000, 8_000, 300]), pool, preset("dense").table(pool))
    )
    one_each = price(task, 1, np.zeros(4, np.int64), np.zeros(4, np.int64), np.arange(4), 0.0)
    grown = grow(task, one_each)
    # One rank stays idle: it lowers nothing, as the three equal ones cannot all go further.
    assert task.degrees[grown.degree].tolist() == [2, 2, 2, 1]
    assert grown.iteration_s < one_each.iteration_s
    assert one_each.degree.tolist() == [0, 0, 0, 0]


def test_two_million_sequences_on_sixteen_thousand_ranks():
    pool = PoolShape(num_ranks=16_384, token_budget=8_192, stages=4, chunks=2)
    lengths = np.concatenate(([16_000_000], np.full(2_000_000, 300)))
    ours, papers = times_s(lengths, pool, preset("dense"))
    assert ours <= papers
