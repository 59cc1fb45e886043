"""Other context-parallel attention on the same gloo ranks, where it runs on a CPU at all.

yunchang is `pip install --no-deps yunchang` (long-context-attention); without it, its rows say so.
"""

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.engine_speed import SCALE, engine_call, random_tensors, world_groups
from benchmarks.lengths import draw_batch
from tests.workers.launch import RankError, run_ranks
from workers.attention.kernels.cpu import flash, flash_backward

Call = Callable[[], object]

RANKS = 2
HEADS = 4
TOKENS = 4_096
TURNS = 6
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Rival:
    """Other attention, the Ulysses degree of ours it is compared with, and the batch."""

    make: Callable[[int, tuple[int, ...]], Call]
    ulysses: int
    case: str = "one sequence"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence; both halves of a rank's zigzag shard are whole."""
        if self.case == "one sequence":
            return (TOKENS,)
        unit = 2 * RANKS
        return tuple(-(-int(n) // unit) * unit for n in draw_batch(TOKENS, 1_024, seed=1))


def rival_rows() -> Iterator[dict[str, object]]:
    """Rows of figure "speedup_over": seconds of the rival over ours, or why it does not run."""
    for name, rival in RIVALS.items():
        lengths = rival.lengths
        row: dict[str, object] = {"figure": "speedup_over", "rival": name, "case": rival.case}
        row |= {"sequences": len(lengths), "tokens": sum(lengths)}
        try:
            ranks = run_ranks(RANKS, partial(timed, rival), timeout_s=TIMEOUT_S)
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


def timed(rival: Rival, rank: int, world_size: int) -> list[tuple[float, float]]:
    """Least (wall, CPU) seconds, forward and backward, of ours and of the rival, in turns."""
    del world_size
    lengths = rival.lengths
    *inputs, d_out = random_tensors(sum(lengths) // RANKS, HEADS, HEADS, torch.float32)
    ours = engine_call(inputs, d_out, lengths, world_groups(rank, RANKS, rival.ulysses))
    calls = (ours, rival.make(rank, lengths))
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for _ in range(TURNS):
        for call, seconds in zip(calls, taken, strict=True):
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.thread_time()
            call()
            dist.barrier()
            seconds.append((time.perf_counter() - started, time.thread_time() - cpu_started))
    return [(min(s[0] for s in seconds), min(s[1] for s in seconds)) for seconds in taken]


def _layer_call(layer: Callable[..., torch.Tensor], lengths: tuple[int, ...]) -> Call:
    """Forward and backward of a layer that takes [1, T, H, D] shards, a call for each sequence."""
    *inputs, d_out = random_tensors(sum(lengths) // RANKS, HEADS, HEADS, torch.float32)
    shares = [length // RANKS for length in lengths]

    def call() -> None:
        pieces = zip(*(x.unsqueeze(0).split(shares, dim=1) for x in inputs), strict=True)
        out = [layer(q, k, v, softmax_scale=SCALE, causal=True) for q, k, v in pieces]
        torch.autograd.grad(torch.cat(out, dim=1).squeeze(0), inputs, d_out)

    return call


def _require_yunchang() -> None:
    if importlib.util.find_spec("yunchang") is None:
        message = "yunchang is not installed"
        raise ModuleNotFoundError(message)


def _yunchang_ulysses(rank: int, lengths: tuple[int, ...], *, same_kernel: bool) -> Call:
    """Its Ulysses layer, with the only kernel it has for a CPU, or with torch's fused one."""
    del rank
    _require_yunchang()
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    if same_kernel:
        layer.attn_fn = _fused
    return _layer_call(layer, lengths)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, **_: object
) -> torch.Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, is_causal=True, scale=softmax_scale)
    return out.transpose(1, 2)


def _yunchang_ring(rank: int, lengths: tuple[int, ...], *, same_kernel: bool) -> Call:
    """Its zigzag ring, with torch's kernel as it calls it, or with the one torch has for a CPU."""
    _require_yunchang()
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType
    from yunchang.ring import zigzag_ring_flash_attn as zigzag

    set_seq_parallel_pg(1, RANKS, rank, RANKS)
    if same_kernel:
        stages = {"fwd-only": _flash_forward, "bwd-only": _flash_backward}
        zigzag.select_flash_attn_impl = lambda _, stage: stages[stage]
    layer = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.TORCH_FLASH)
    return _layer_call(layer, lengths)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: float, scale: float, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, S, H, D] and [1, H, S], as a block of its ring wants them."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = flash(*heads_first, 0.0, options["causal"], scale=scale)
    return out.transpose(1, 2), lse


def _flash_backward(*arguments: Any, **_: Any) -> None:
    """Fills the three buffers it is given."""
    tensors, lse, buffers = arguments[:5], arguments[5], arguments[6:9]
    heads_first = (x.transpose(1, 2) for x in tensors)
    gradients = flash_backward(*heads_first, lse, 0.0, arguments[11], scale=arguments[10])
    for buffer, gradient in zip(buffers, gradients, strict=True):
        buffer.copy_(gradient.transpose(1, 2))


def _torch_context_parallel(rank: int, lengths: tuple[int, ...]) -> Call:
    """torch.distributed.tensor.experimental's context_parallel around the fused operator."""
    del rank, lengths
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


# Documents are packed for ours; yunchang has nothing for packed sequences without flash-attn.
_ulysses = partial(_yunchang_ulysses, same_kernel=True)
_ring = partial(_yunchang_ring, same_kernel=True)
RIVALS = {
    "yunchang Ulysses": Rival(partial(_yunchang_ulysses, same_kernel=False), RANKS),
    "yunchang zigzag ring": Rival(partial(_yunchang_ring, same_kernel=False), 1),
    "yunchang Ulysses, given our kernel": Rival(_ulysses, RANKS),
    "yunchang zigzag ring, given our kernel": Rival(_ring, 1),
    "yunchang Ulysses, given our kernel, a call each": Rival(_ulysses, RANKS, "documents"),
    "yunchang zigzag ring, given our kernel, a call each": Rival(_ring, 1, "documents"),
    "torch experimental context_parallel": Rival(_torch_context_parallel, 1),
}
