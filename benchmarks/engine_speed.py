"""The attention engine against its own kernel, and two ranks against one.

Shape legend: T tokens, H query heads, K key-value heads, D head dim.
"""

import ctypes
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from benchmarks.lengths import draw_batch
from tests.workers.launch import run_ranks
from workers.attention.counters import Counters
from workers.attention.engine import context_parallel_attention
from workers.attention.kernels import choose_kernel
from workers.attention.kernels.cpu import flash, flash_backward
from workers.attention.layout import CPGroups, ring_layout

Tensor = torch.Tensor
Call = Callable[[], object]

HEADS, KV_HEADS, HEAD_DIM = 4, 4, 64
SCALE = HEAD_DIM**-0.5
CAUSAL = {"dropout_p": 0.0, "is_causal": True}
DEGREE2_TOKENS = 16_384
TURNS = 15
DEGREE2_TURNS = 3
TIMEOUT_S = 400.0


def speed_rows() -> Iterator[dict[str, object]]:
    """Rows of figures "degree1_over_kernel" and "degree2_speedup"."""
    packed = tuple(int(length) for length in draw_batch(8_192, 2_048, seed=1))
    for case, lengths in {"one sequence": (2_048,), "packed documents": packed}.items():
        for dtype in (torch.float32, torch.bfloat16):
            yield degree1_row(case, lengths, dtype)
    for ulysses in (2, 1):
        yield degree2_row(ulysses)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, for the calls to come.

    Else it gives some of it back to the system, and which of the calls that are compared pays
    for it again, in page faults, is chance: 4% of a call, to and fro between processes.
    """
    libc = ctypes.CDLL(None)
    mmap_threshold, trim_threshold = -3, -1  # of <malloc.h>
    for option, num_bytes in ((mmap_threshold, 32 << 20), (trim_threshold, 1 << 30)):
        if not libc.mallopt(option, num_bytes):
            raise RuntimeError("glibc did not take the option")


def degree1_row(case: str, lengths: tuple[int, ...], dtype: torch.dtype) -> dict[str, object]:
    """CPU seconds, forward and backward: the engine's over the kernel's for the same packed batch.

    `over_operators` is against torch's operators alone, whose results nobody packs.
    """
    *inputs, d_out = random_tensors(sum(lengths), HEADS, KV_HEADS, dtype)
    engine_s, kernel_s, operators_s = cpu_s_in_turns(
        engine_call(inputs, d_out, lengths, CPGroups()),
        kernel_call(inputs, d_out, lengths),
        operators_call(inputs, d_out, lengths),
    )
    return {
        "figure": "degree1_over_kernel",
        "value": engine_s / kernel_s,
        "over_operators": engine_s / operators_s,
        "case": case,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "dtype": str(dtype).removeprefix("torch."),
        "engine_cpu_s": engine_s,
    }


def random_tensors(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value that want gradients, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads, kv_heads, kv_heads, heads)
    tensors = [torch.randn(tokens, n, HEAD_DIM, generator=generator).to(dtype) for n in sizes]
    return [x.requires_grad_() for x in tensors[:3]] + tensors[3:]


def engine_call(
    inputs: list[Tensor], d_out: Tensor, lengths: tuple[int, ...], groups: CPGroups
) -> Call:
    """Forward and backward through the engine; gradients go to nobody, as in a layer's middle."""

    def call() -> None:
        out = context_parallel_attention(
            *inputs, lengths=lengths, groups=groups, scale=SCALE, counters=Counters()
        )
        torch.autograd.grad(out, inputs, d_out)

    return call


def kernel_call(inputs: list[Tensor], d_out: Tensor, lengths: tuple[int, ...]) -> Call:
    """The kernel alone, packed in and out, without engine or autograd."""
    kernel = choose_kernel("cpu", d_out.dtype)
    block = ring_layout(lengths, 1, d_out.device).own.block
    q, k, v = (x.detach() for x in inputs)

    def call() -> None:
        out, lse = kernel.forward(q, k, v, block, SCALE)
        kernel.backward(d_out, q, k, v, out, lse, block, SCALE)

    return call


def operators_call(inputs: list[Tensor], d_out: Tensor, lengths: tuple[int, ...]) -> Call:
    """The operators the kernel calls, sequence by sequence; their results are dropped."""
    sequences = [
        [piece.transpose(0, 1).unsqueeze(0) for piece in pieces]
        for pieces in zip(*(x.detach().split(lengths) for x in (d_out, *inputs)), strict=True)
    ]

    def call() -> None:
        for d_piece, q, k, v in sequences:
            out, lse = flash(q, k, v, scale=SCALE, **CAUSAL)
            flash_backward(d_piece, q, k, v, out, lse, scale=SCALE, **CAUSAL)

    return call


def cpu_s_in_turns(*calls: Call) -> list[float]:
    """Least seconds of this thread's CPU of each, taken in turns: other work only ever adds."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, seconds in zip(calls, taken, strict=True):
            started = time.thread_time()
            call()
            seconds.append(time.thread_time() - started)
    return [min(seconds) for seconds in taken]


def degree2_row(ulysses: int) -> dict[str, object]:
    """One sequence on one rank over the same on two, forward and backward, by the clock.

    `cpu_value` is the same ratio in CPU seconds of the main threads: what the clock would say on
    an idle machine if nothing waited.
    """
    alone = run_ranks(1, timed_attention, 1, timeout_s=TIMEOUT_S)
    both = run_ranks(2, timed_attention, ulysses, timeout_s=TIMEOUT_S)
    wall_s = [max(rank[0] for rank in ranks) for ranks in (alone, both)]
    cpu_s = [max(rank[1] for rank in ranks) for ranks in (alone, both)]
    return {
        "figure": "degree2_speedup",
        "value": wall_s[0] / wall_s[1],
        "cpu_value": cpu_s[0] / cpu_s[1],
        "ulysses": ulysses,
        "ring": 2 // ulysses,
        "tokens": DEGREE2_TOKENS,
        "degree1_s": wall_s[0],
        "degree2_s": wall_s[1],
        "exposed_wait_s": max(rank[2] for rank in both),
    }


def timed_attention(rank: int, world_size: int, ulysses: int) -> tuple[float, float, float]:
    """Best (wall, CPU, exposed wait) seconds of a few turns on this rank."""
    lengths = (DEGREE2_TOKENS,)
    whole = world_groups(rank, world_size, ulysses)
    *inputs, d_out = random_tensors(DEGREE2_TOKENS // world_size, HEADS, KV_HEADS, torch.float32)
    taken = []
    for _ in range(DEGREE2_TURNS):
        counters = Counters()
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.thread_time()
        out = context_parallel_attention(
            *inputs, lengths=lengths, groups=whole, scale=SCALE, counters=counters
        )
        torch.autograd.grad(out, inputs, d_out)
        dist.barrier()
        taken.append(
            (
                time.perf_counter() - started,
                time.thread_time() - cpu_started,
                counters.exposed_wait_s,
            )
        )
    return min(taken)


def world_groups(rank: int, degree: int, ulysses: int) -> CPGroups:
    """A world that is one Ulysses group, or one ring."""
    is_inner = ulysses > 1
    return CPGroups(
        cp=dist.group.WORLD,
        inner=dist.group.WORLD if is_inner else None,
        ring=dist.group.WORLD if degree > ulysses else None,
        degree=degree,
        ulysses=ulysses,
        rank=rank,
    )
