"""Batches and pools that planner tests draw from: every pool size, ties, giants, few sequences."""

import numpy as np
from hypothesis import strategies as st

from planner.cost import CostModel
from planner.pool import PoolShape

POOL_SIZES = st.one_of(st.integers(1, 64), st.sampled_from((96, 100, 128, 257, 512)))


@st.composite
def pools(draw, sizes=POOL_SIZES):
    num_ranks = draw(sizes)
    return PoolShape(
        num_ranks=num_ranks,
        token_budget=draw(st.sampled_from((64, 250, 512, 2048, 8192))),
        stages=draw(st.integers(1, 4)),
        chunks=draw(st.integers(1, 3)),
        max_degree=draw(st.one_of(st.none(), st.integers(1, num_ranks))),
        pad_unit=draw(st.sampled_from((2, 4))),
    )


@st.composite
def batches(draw, pool, most=120):
    """Lengths that fit the pool: few values (ties), a wide spread, or one giant among shorts."""
    longest = pool.longest_sequence
    shape = draw(st.sampled_from(("ties", "spread", "giant", "equal", "short")))
    if shape == "ties":
        values = st.sampled_from(draw(st.lists(st.integers(1, longest), min_size=1, max_size=4)))
    elif shape == "equal":
        values = st.just(draw(st.integers(1, longest)))
    elif shape == "spread":
        values = st.integers(1, longest)
    else:
        values = st.integers(1, max(1, longest // 64))
    lengths = draw(st.lists(values, max_size=most))
    if shape == "giant":
        lengths.insert(draw(st.integers(0, len(lengths))), longest)
    return np.array(lengths, dtype=np.int64)


@st.composite
def pools_with_batches(draw, most=120):
    pool = draw(pools())
    return pool, draw(batches(pool, most))


COSTS = st.builds(
    CostModel,
    quadratic_s=st.sampled_from((0.0, 1e-10, 4e-10, 1e-8)),
    linear_s=st.sampled_from((1e-6, 1.5e-5)),
    fixed_s=st.sampled_from((0.0, 1e-4, 5.8e-3, 1.0)),
)
