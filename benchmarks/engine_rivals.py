"""Other context-parallel attention on the same gloo ranks, where it runs on a CPU at all.

yunchang is `pip install --no-deps yunchang` (long-context-attention); without it, its rows say so.
"""

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.engine_speed import SCALE, engine_call, random_tensors, world_groups
from tests.workers.launch import RankError, run_ranks

Call = Callable[[], object]

RANKS = 2
HEADS = 4
TOKENS = 4_096
TURNS = 6
TIMEOUT_S = 300.0


def rival_rows() -> Iterator[dict[str, object]]:
    """Rows of figure "speedup_over": seconds of the rival over ours, or why it does not run."""
    for name, (make, ulysses) in RIVALS.items():
        row: dict[str, object] = {"figure": "speedup_over", "rival": name, "tokens": TOKENS}
        try:
            ranks = run_ranks(RANKS, partial(timed, make, ulysses), timeout_s=TIMEOUT_S)
        except RankError as error:
            yield row | {"value": None, "why_not": _reason(str(error))}
            continue
        (ours_s, ours_cpu_s), (rival_s, rival_cpu_s) = np.max(ranks, axis=0).tolist()
        yield row | {
            "value": rival_s / ours_s,
            "cpu_value": rival_cpu_s / ours_cpu_s,
            "rival_s": rival_s,
            "ours_s": ours_s,
        }


def _reason(report: str) -> str:
    """The exception's own first line, out of the ranks' tracebacks."""
    named = [line for line in report.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or report.splitlines())[0][:200]


def timed(
    make: Callable[[int], Call], ulysses: int, rank: int, world_size: int
) -> list[tuple[float, float]]:
    """Least (wall, CPU) seconds, forward and backward, of ours and of the rival, in turns."""
    del world_size
    calls = (_ours(rank, ulysses), make(rank))
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for _ in range(TURNS):
        for call, seconds in zip(calls, taken, strict=True):
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.thread_time()
            call()
            dist.barrier()
            seconds.append((time.perf_counter() - started, time.thread_time() - cpu_started))
    return [(min(s[0] for s in seconds), min(s[1] for s in seconds)) for seconds in taken]


def _ours(rank: int, ulysses: int) -> Call:
    *inputs, d_out = random_tensors(TOKENS // RANKS, HEADS, HEADS, torch.float32)
    return engine_call(inputs, d_out, (TOKENS,), world_groups(rank, RANKS, ulysses))


def _layer_call(layer: Callable[..., torch.Tensor]) -> Call:
    """Forward and backward of a layer that takes [1, T, H, D] shards."""
    *inputs, d_out = random_tensors(TOKENS // RANKS, HEADS, HEADS, torch.float32)

    def call() -> None:
        q, k, v = (x.unsqueeze(0) for x in inputs)
        layer(q, k, v, softmax_scale=SCALE, causal=True).squeeze(0).backward(d_out)
        for x in inputs:
            x.grad = None

    return call


def _require_yunchang() -> None:
    if importlib.util.find_spec("yunchang") is None:
        message = "yunchang is not installed"
        raise ModuleNotFoundError(message)


def _yunchang_ulysses(rank: int, *, same_kernel: bool) -> Call:
    """Its Ulysses layer, with the only kernel it has for a CPU, or with torch's fused one."""
    del rank
    _require_yunchang()
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    if same_kernel:
        layer.attn_fn = _fused
    return _layer_call(layer)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, **_: object
) -> torch.Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, is_causal=True, scale=softmax_scale)
    return out.transpose(1, 2)


def _yunchang_ring(rank: int, *, kind: str) -> Call:
    _require_yunchang()
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    set_seq_parallel_pg(1, RANKS, rank, RANKS)
    layer = LongContextAttention(ring_impl_type=kind, attn_type=AttnType.TORCH_FLASH)
    return _layer_call(layer)


def _torch_context_parallel(rank: int) -> Call:
    """torch.distributed.tensor.experimental's context_parallel around the fused operator."""
    del rank
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (RANKS,))
    *inputs, _ = random_tensors(TOKENS, HEADS, HEADS, torch.float32)
    whole = [x.detach().transpose(0, 1).unsqueeze(0).contiguous() for x in inputs]
    truth = scaled_dot_product_attention(*whole, is_causal=True, scale=SCALE).sum(2)
    shards = [x.clone() for x in whole]

    def call() -> None:
        with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2, 2, 2]):
            leaves = [x.detach().clone().requires_grad_() for x in shards]
            out = scaled_dot_product_attention(*leaves, is_causal=True, scale=SCALE)
            out.sum().backward()
        total = out.detach().sum(2)  # over tokens: the same, however they are shared out
        dist.all_reduce(total)
        if not torch.allclose(total, truth, atol=1e-2):
            message = "runs, but its numbers are wrong: each rank attends to its own tokens only"
            raise RuntimeError(message)

    return call


# name -> (what builds it on a rank, the Ulysses degree of ours that it is compared with)
RIVALS: dict[str, tuple[Callable[[int], Call], int]] = {
    "yunchang Ulysses": (partial(_yunchang_ulysses, same_kernel=False), RANKS),
    "yunchang Ulysses, given our kernel": (partial(_yunchang_ulysses, same_kernel=True), RANKS),
    "yunchang zigzag ring": (partial(_yunchang_ring, kind="zigzag"), 1),
    "yunchang basic_pytorch ring": (partial(_yunchang_ring, kind="basic_pytorch"), 1),
    "torch experimental context_parallel": (_torch_context_parallel, 1),
}
