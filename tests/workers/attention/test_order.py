"""Launches as early as tensors are final, waits as late as they may; backward mirrors."""

import pytest
import torch
import torch.utils.checkpoint

from tests.workers.attention.cases import GQA, Case, world_groups
from tests.workers.launch import run_ranks
from workers.attention.all_to_all import marked
from workers.attention.counters import Counters
from workers.attention.engine import Attention, context_parallel_attention

FORWARD = [
    *(f"forward {event}" for event in ("launch query", "launch value", "launch key", "gate")),
    *(f"forward wait {name}" for name in ("query", "value", "key")),
    "forward kernel",
    *(f"forward {event}" for event in ("launch output", "wait output")),
]
MIRROR = [
    *(f"backward {event}" for event in ("launch output", "wait output")),
    "backward kernel",
    *(f"backward launch {name}" for name in ("key", "value", "query")),
    *(f"backward {event}" for event in ("gate", "wait key", "wait value", "wait query")),
]


def layer(attention: Attention, q, k, v, gate):
    """What a gated layer does, in the order of the paper's section 5.2.2."""
    query = attention.launch_query(q * 1.0)
    value = attention.launch_value(v * 1.0)
    key = attention.launch_key(k * 1.0)
    gate = torch.sigmoid(marked(gate, attention.counters, "gate"))
    return attention.attend(query, key, value) * gate


def gated_layer(rank, world_size, *, overlap, recompute=False):
    case = Case.random(GQA, (24,), world_size)
    inputs = [case.shard(x, rank).requires_grad_() for x in (*case.inputs, case.d_out)]
    attention = Attention(
        lengths=case.padded_lengths,
        groups=world_groups(rank, world_size, world_size),
        scale=GQA.scale,
        counters=Counters(keep_events=True),
        overlap=overlap,
    )
    run = lambda *x: layer(attention, *x)  # noqa: E731
    if recompute:
        out = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=True)
    else:
        out = run(*inputs)
    out.sum().backward()
    names = [event.name for event in attention.counters.events]
    return names, [out.detach(), *(x.grad for x in inputs)]


def overlapped(rank, world_size):
    return gated_layer(rank, world_size, overlap=True)


def blocking(rank, world_size):
    return gated_layer(rank, world_size, overlap=False)


def recomputed(rank, world_size):
    return gated_layer(rank, world_size, overlap=True, recompute=True)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_to_alls_span_the_gate_forward_and_backward(world_size):
    for names, _ in run_ranks(world_size, overlapped):
        assert names == FORWARD + MIRROR


def test_recompute_runs_the_same_order_again():
    for names, _ in run_ranks(2, recomputed):
        assert names == FORWARD + FORWARD + MIRROR


def test_blocking_waits_at_once_and_gives_the_same_bits():
    pairs = zip(run_ranks(2, overlapped), run_ranks(2, blocking), strict=True)
    for (_, early), (names, late) in pairs:
        assert names[:2] == ["forward launch query", "forward wait query"]
        assert names.index("forward gate") > names.index("forward wait key")
        assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))


def ring_events(rank, world_size):
    case = Case.random(GQA, (24,), world_size)
    counters = Counters(keep_events=True)
    out = context_parallel_attention(
        *(case.shard(x, rank).requires_grad_() for x in case.inputs),
        lengths=case.padded_lengths,
        groups=world_groups(rank, world_size, 1),
        scale=GQA.scale,
        counters=counters,
    )
    out.sum().backward()
    return [event.name for event in counters.events]


def test_a_ring_computes_while_the_next_keys_and_the_last_gradients_travel():
    hop = ["launch key-value", "kernel", "wait key-value"]
    forward = [f"forward {name}" for name in [*hop, *hop, "kernel"]]
    backward = [
        f"backward {name}"
        for name in [
            *hop,  # its own keys: their gradient stays
            *["launch key-value", "kernel", "launch gradient", "wait key-value"],
            *["kernel", "wait gradient", "launch gradient", "wait gradient"],
        ]
    ]
    for names in run_ranks(3, ring_events):
        assert names == forward + backward
