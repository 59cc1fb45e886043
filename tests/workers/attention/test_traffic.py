"""Bytes counted on the wire equal the formula the planner prices, to the byte."""

import math
from functools import cache

import pytest
import torch

from planner.factorize import ALLTOALL_PASSES, RING_PASSES, AttentionShape, traffic_bytes
from tests.workers.attention.cases import Case, Heads, world_groups
from tests.workers.launch import run_ranks
from workers.attention.counters import Counters
from workers.attention.engine import context_parallel_attention
from workers.attention.layout import CPGroups

# (degree, ulysses, query heads, key-value heads, d_qk, d_v)
CONFIGURATIONS = [
    (1, 1, 8, 2, 16, 16),
    (2, 1, 8, 8, 16, 16),
    (2, 2, 8, 8, 16, 16),
    (2, 1, 8, 2, 16, 16),
    (2, 2, 8, 2, 16, 16),
    (2, 2, 8, 1, 16, 16),
    (2, 2, 8, 8, 24, 16),
    (2, 1, 8, 8, 24, 16),
    (3, 1, 6, 3, 8, 8),
    (3, 3, 6, 3, 8, 8),
    (3, 3, 6, 1, 8, 8),
    (3, 3, 12, 12, 24, 16),
    (4, 1, 8, 2, 16, 16),
    (4, 2, 8, 2, 16, 16),
    (4, 4, 8, 2, 16, 16),
    (4, 4, 8, 1, 12, 20),
    (4, 2, 8, 8, 24, 16),
    (4, 4, 8, 8, 24, 16),
    (4, 1, 8, 8, 24, 16),
    (4, 2, 4, 1, 8, 8),
    (6, 2, 8, 2, 16, 16),
    (6, 3, 6, 3, 8, 16),
]


def bytes_sent(groups: CPGroups, heads: Heads, dtype: torch.dtype):
    """(tokens of the group, bytes forward, bytes forward and backward) of this rank."""
    case = Case.random(heads, (5, 60), groups.degree)
    counters = Counters()
    leaves = [case.shard(x, groups.rank).to(dtype).requires_grad_() for x in case.inputs]
    out = context_parallel_attention(
        *leaves,
        lengths=case.padded_lengths,
        groups=groups,
        scale=heads.scale,
        counters=counters,
    )
    forward = dict(counters.bytes_sent)
    out.sum().backward()
    return sum(case.padded_lengths), forward, dict(counters.bytes_sent)


def bytes_of_all(rank, world_size):
    return {
        configuration: bytes_sent(
            world_groups(rank, world_size, configuration[1]),
            Heads(*configuration[2:]),
            torch.float32,
        )
        for configuration in CONFIGURATIONS
        if configuration[0] == world_size
    }


@cache
def measured(degree: int):
    """Every configuration of one degree, in one world."""
    return run_ranks(degree, bytes_of_all)


def exact(bytes_per_token: float, tokens: int) -> int:
    """The formula's whole number of bytes; floats only carry it."""
    nearest = round(bytes_per_token * tokens)
    assert math.isclose(bytes_per_token * tokens, nearest, rel_tol=1e-12)
    return nearest


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_counted_bytes_equal_the_formula(configuration):
    degree, ulysses, num_heads, num_kv_heads, qk_dim, v_dim = configuration
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        bytes_per_element=4,
    )
    per_token = traffic_bytes(shape, ulysses, degree // ulysses)
    for rank in measured(degree):
        tokens, forward, both = rank[configuration]
        alltoall = exact(per_token.alltoall_bytes, tokens)
        ring = exact(per_token.ring_bytes, tokens)
        assert forward.get("all_to_all", 0) == alltoall
        assert forward.get("ring", 0) == ring
        assert both.get("all_to_all", 0) == ALLTOALL_PASSES * alltoall
        assert both.get("ring", 0) == RING_PASSES * ring


def ring_in_bfloat16(rank, world_size):
    return bytes_sent(world_groups(rank, world_size, 1), Heads(8, 2, 16, 16), torch.bfloat16)


def test_bfloat16_gradients_travel_a_ring_in_float32():
    for _, forward, both in run_ranks(2, ring_in_bfloat16):
        assert both["ring"] == forward["ring"] * (1 + 1 + 2)
