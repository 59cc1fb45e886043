"""The engine on gloo worlds: every group shape gives one process's numbers."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from planner.errors import InputError
from tests.workers.attention.cases import (
    FACTORISATIONS,
    GQA,
    KINDS,
    MHA,
    Case,
    Heads,
    largest_error,
    world_groups,
)
from tests.workers.launch import run_ranks
from workers.attention.counters import Counters
from workers.attention.engine import context_parallel_attention
from workers.attention.layout import CPGroups

LENGTHS = (1, 7, 40, 13, 40)
FACTORED = pytest.mark.parametrize(
    ("degree", "ulysses"), FACTORISATIONS, ids=[f"{u}x{p // u}" for p, u in FACTORISATIONS]
)


def run_engine(case: Case, groups: CPGroups, dtype: torch.dtype, **options):
    """(out, dq, dk, dv) of this rank's shard; inputs are strided views, as layers hand them in."""
    leaves = [case.shard(x, groups.rank).to(dtype).requires_grad_() for x in case.inputs]
    strided = [torch.cat([x, x], dim=-1)[..., : x.size(-1)] for x in leaves]
    out = context_parallel_attention(
        *strided,
        lengths=case.padded_lengths,
        groups=groups,
        scale=case.heads.scale,
        counters=options.pop("counters", Counters()),
        **options,
    )
    d_out = case.shard(case.d_out, groups.rank).to(dtype)
    out.backward(torch.cat([d_out, d_out], dim=1)[:, : d_out.size(1)])  # strided too
    return out.detach(), *(x.grad for x in leaves)


def engine_errors(groups: CPGroups, heads: Heads, dtype: torch.dtype) -> list[float]:
    """Largest error of this rank's (out, dq, dk, dv) against the unpadded textbook in float64."""
    case = Case.random(heads, LENGTHS, groups.degree)
    results = run_engine(case, groups, dtype)
    real = case.shard(case.is_real, groups.rank)
    assert all(torch.isfinite(x).all() for x in results)
    assert all((gradient[~real] == 0).all() for gradient in results[1:])
    return [
        largest_error((x * real[:, None, None]), case.shard(truth, groups.rank), of=truth)
        for x, truth in zip(results, case.truth(), strict=True)
    ]


def one_device_errors(degree: int, heads: Heads, dtype: torch.dtype) -> list[float]:
    """The errors of the bare engine at degree 1 on the same tokens."""
    case = Case.random(heads, LENGTHS, degree)
    whole = replace(case, degree=1, lengths=case.padded_lengths)
    results = run_engine(whole, CPGroups(), dtype)
    real = case.is_real[:, None, None]
    return [
        largest_error(x * real, truth, of=truth)
        for x, truth in zip(results, case.truth(), strict=True)
    ]


def errors_of_all_kinds(rank, world_size, ulysses):
    groups = world_groups(rank, world_size, ulysses)
    return {
        (kind, dtype): engine_errors(groups, heads, dtype)
        for kind, heads in KINDS.items()
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    }


@cache
def worst_errors(degree: int, ulysses: int) -> dict[tuple[str, torch.dtype], list[float]]:
    """(kind, dtype) -> the worst rank's error of each of (out, dq, dk, dv). One world for all."""
    ranks = run_ranks(degree, errors_of_all_kinds, ulysses)
    return {
        key: [max(of_ranks) for of_ranks in zip(*(rank[key] for rank in ranks), strict=True)]
        for key in ranks[0]
    }


@FACTORED
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_group_shape_equals_one_process(degree, ulysses, kind, dtype, limit):
    assert max(worst_errors(degree, ulysses)[kind, dtype]) <= limit


@FACTORED
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_good_as_one_device(degree, ulysses, kind):
    one_device = one_device_errors(degree, KINDS[kind], torch.bfloat16)
    errors = worst_errors(degree, ulysses)[kind, torch.bfloat16]
    for actual, single in zip(errors, one_device, strict=True):
        assert actual <= 2 * single


def overlapped_and_blocking(rank, world_size, ulysses):
    case = Case.random(GQA, LENGTHS, world_size)
    groups = world_groups(rank, world_size, ulysses)
    overlapped = run_engine(case, groups, torch.float32, overlap=True)
    blocking = run_engine(case, groups, torch.float32, overlap=False)
    return all(torch.equal(a, b) for a, b in zip(overlapped, blocking, strict=True))


@pytest.mark.parametrize(("degree", "ulysses"), [(2, 2), (4, 2), (4, 4)])
def test_overlapped_and_blocking_give_the_same_bits(degree, ulysses):
    assert all(run_ranks(degree, overlapped_and_blocking, ulysses))


def same_bits_twice(rank, world_size, ulysses):
    case = Case.random(GQA, LENGTHS, world_size)
    groups = world_groups(rank, world_size, ulysses)
    first, second = (run_engine(case, groups, torch.float32) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_same_input_gives_the_same_bits():
    assert all(run_ranks(4, same_bits_twice, 2))


def with_reference_kernel(rank, world_size):
    case = Case.random(MHA, LENGTHS, world_size)
    results = run_engine(case, world_groups(rank, world_size, 1), torch.float64, kernel="reference")
    real = case.shard(case.is_real, rank)[:, None, None]
    return max(
        largest_error(x * real, case.shard(truth, rank), of=truth)
        for x, truth in zip(results, case.truth(), strict=True)
    )


def test_a_ring_merges_the_reference_kernel_too():
    assert max(run_ranks(3, with_reference_kernel)) <= 1e-12


def test_a_batch_without_tokens_comes_back_empty():
    q, k = torch.zeros(0, 4, 8, requires_grad=True), torch.zeros(0, 2, 8, requires_grad=True)
    out = context_parallel_attention(
        q, k, k, lengths=(0, 0), groups=CPGroups(), scale=1.0, counters=Counters()
    )
    out.sum().backward()
    assert out.shape == (0, 4, 8)
    assert k.grad.shape == (0, 2, 8)


def test_odd_lengths_need_no_padding_at_degree_one():
    case = Case.random(GQA, (1, 7, 5), 1)
    unpadded = [x[case.is_real] for x in case.inputs]
    out = context_parallel_attention(
        *unpadded, lengths=(1, 7, 5), groups=CPGroups(), scale=GQA.scale, counters=Counters()
    )
    truth = case.truth()[0][case.is_real]
    assert largest_error(out, truth, of=truth) <= 1e-14


@pytest.mark.parametrize(
    ("heads", "lengths", "groups", "message"),
    [
        (8, (6,), CPGroups(degree=3, ulysses=3), "must divide the query heads"),
        (6, (8,), CPGroups(degree=3, ulysses=3), "multiples of 6"),
        (6, (12,), CPGroups(degree=3, ulysses=3), "not this rank's share"),
    ],
)
def test_bad_input_is_refused_before_any_collective(heads, lengths, groups, message):
    x = torch.zeros(2, heads, 4)
    with pytest.raises(InputError, match=message):
        context_parallel_attention(
            x, x, x, lengths=lengths, groups=groups, scale=1.0, counters=Counters()
        )


def uneven_errors(rank, world_size, heads):
    return engine_errors(world_groups(rank, world_size, world_size), heads, torch.float64)


@pytest.mark.parametrize("heads", [Heads(6, 2, 8, 8), Heads(6, 3, 8, 8)])
def test_key_value_heads_that_neither_divide_nor_multiply_the_ulysses_degree(heads):
    """u = 3 with 2 heads, u = 2 with 3: replicated to the least common multiple."""
    for errors in run_ranks(5 - heads.key_value, uneven_errors, heads):
        assert max(errors) <= 1e-12
