"""Costs against the formula by hand; factorisation against all splits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost import CostModel
from planner.errors import InputError
from planner.factorize import AttentionShape, factorize, largest_degree, traffic_bytes
from planner.pool import PoolShape
from planner.presets import PRESETS, preset

GQA = AttentionShape(num_heads=64, num_kv_heads=8, qk_dim=128, v_dim=128)
MLA = AttentionShape(num_heads=128, num_kv_heads=128, qk_dim=192, v_dim=128)


def test_sequence_seconds_follow_the_formula():
    table = preset("mla").table(PoolShape(num_ranks=64, token_budget=8192))
    for index, degree in enumerate(table.degrees.tolist()):
        for length in (1, 700, 262_144):
            padded = -(-length // (2 * degree)) * 2 * degree
            attention = table.quadratic_s[index] * length**2
            ring = max(0.0, table.ring_s[index] * padded - attention)
            tokens = (table.linear_s[index] + table.alltoall_s[index]) * padded
            seconds = table.sequence_s(np.array([length]), index)[0]
            assert seconds == pytest.approx(attention + ring + tokens, rel=1e-12)


def test_lengths_and_degrees_broadcast():
    table = CostModel().table(PoolShape(num_ranks=8, token_budget=8192))
    lengths, classes = np.array([100, 5_000, 9_000]), np.array([0, 3, 2])
    each = [table.sequence_s(lengths[i : i + 1], int(classes[i]))[0] for i in range(3)]
    assert table.sequence_s(lengths, classes).tolist() == each


def test_one_rank_has_no_traffic():
    for cost in PRESETS.values():
        table = cost.table(PoolShape(num_ranks=16, token_budget=8192))
        assert table.alltoall_s[0] == table.ring_s[0] == 0


def test_traffic_is_what_published_shapes_send():
    """256K tokens, bf16, GB a rank and layer: the figures of docs/planner.md."""
    tokens = 262_144
    assert traffic_bytes(MLA, 1, 32).ring_bytes * tokens / 1e9 == pytest.approx(20.8, abs=0.05)
    assert traffic_bytes(MLA, 32, 1).alltoall_bytes * tokens / 1e9 == pytest.approx(1.30, abs=0.01)
    mixed = traffic_bytes(GQA, 32, 4)
    assert mixed.alltoall_bytes * tokens / 1e9 == pytest.approx(0.098, abs=0.001)
    assert mixed.ring_bytes * tokens / 1e9 == pytest.approx(0.101, abs=0.001)


@given(
    degree=st.sampled_from((1, 2, 3, 4, 6, 8, 12, 64, 96, 512)),
    attention=st.sampled_from((GQA, MLA)),
    cp_comm=st.sampled_from(("auto", "ring", (4, 512))),
    tensor=st.sampled_from((1, 2, 8)),
)
def test_splits_multiply_to_the_degree_and_cut_the_heads(degree, attention, cp_comm, tensor):
    u, r = factorize(degree, attention, cp_comm=cp_comm, tensor=tensor)
    assert u * r == degree
    assert attention.num_heads // tensor % u == 0
    if cp_comm == "ring":
        assert u == 1


def test_latent_attention_goes_ulysses_first():
    assert factorize(64, MLA) == (64, 1)
    assert factorize(256, MLA) == (128, 2)


def test_a_degree_beyond_the_heads_has_no_pure_ulysses_split():
    with pytest.raises(InputError, match="ulysses"):
        factorize(128, GQA, cp_comm="ulysses")
    degrees = PoolShape(num_ranks=512, token_budget=1).degrees
    assert largest_degree(degrees, GQA, cp_comm="ulysses") == 64
    assert largest_degree(degrees, GQA, cp_comm="auto") == 512


@pytest.mark.parametrize("field", ["quadratic_s", "linear_s", "fixed_s", "inter_node_bytes_per_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_costs_that_are_no_numbers_are_refused(field, value):
    with pytest.raises(InputError, match=field):
        CostModel(**{field: value})


def test_presets_are_named():
    assert set(PRESETS) == {"dense", "moe", "mla"}
    with pytest.raises(InputError, match="preset"):
        preset("huge")
