"""Other context-parallel attention on the same gloo ranks, where it runs on a CPU at all.

yunchang is `pip install --no-deps yunchang` (long-context-attention); without it, its rows say so.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import engine_yunchang as yunchang
from benchmarks.engine_speed import SCALE, random_tensors, world_groups
from benchmarks.engine_yunchang import Forward
from benchmarks.lengths import draw_batch
from tests.workers.launch import RankError, run_ranks
from workers.attention.counters import Counters
from workers.attention.engine import context_parallel_attention
from workers.attention.layout import CPGroups

RANKS = 2
HEADS = 4
TOKENS = 4_096
TURNS = 6
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Rival:
    """Other attention, the Ulysses degree of ours it is compared with, and the batch."""

    make: Callable[[int, tuple[int, ...]], Forward]
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
        (ours_s, ours_cpu_s), (rival_s, rival_cpu_s) = np.max([t.taken for t in ranks], axis=0)
        yield row | {
            "value": float(rival_s / ours_s),
            "cpu_value": float(rival_cpu_s / ours_cpu_s),
            "rival_s": float(rival_s),
            "ours_s": float(ours_s),
            "kernel_share_of_ours": min(t.kernel_share for t in ranks),
        }


def _reason(report: str) -> str:
    """The exception's own first line, out of the ranks' tracebacks."""
    named = [line for line in report.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (named or report.splitlines())[0][:200]


class Timed(NamedTuple):
    """Least (wall, CPU) seconds of ours and of the rival, and how much of ours the kernel is."""

    taken: list[tuple[float, float]]
    kernel_share: float


def timed(rival: Rival, rank: int, world_size: int) -> Timed:
    """Forward and backward of ours and of the rival, in turns."""
    del world_size
    lengths = rival.lengths
    *inputs, d_out = random_tensors(sum(lengths) // RANKS, HEADS, HEADS, torch.float32)
    groups = world_groups(rank, RANKS, rival.ulysses)
    counters = Counters()
    attentions = (partial(_ours, lengths, groups, counters), rival.make(rank, lengths))
    _require_equal(rival, *(attention(*inputs).detach() for attention in attentions))
    before_s = counters.kernel_s
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for _ in range(TURNS):
        for attention, seconds in zip(attentions, taken, strict=True):
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.thread_time()
            torch.autograd.grad(attention(*inputs), inputs, d_out)
            dist.barrier()
            seconds.append((time.perf_counter() - started, time.thread_time() - cpu_started))
    least = [(min(s[0] for s in seconds), min(s[1] for s in seconds)) for seconds in taken]
    return Timed(least, (counters.kernel_s - before_s) / sum(s[0] for s in taken[0]))


def _ours(
    lengths: tuple[int, ...], groups: CPGroups, counters: Counters, *qkv_THD: torch.Tensor
) -> torch.Tensor:
    return context_parallel_attention(
        *qkv_THD, lengths=lengths, groups=groups, scale=SCALE, counters=counters
    )


def _require_equal(rival: Rival, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Refuse a ring with other results; under Ulysses the two lay tokens out differently."""
    if rival.ulysses > 1:
        return
    if not torch.allclose(ours, theirs, atol=1e-4):
        message = "runs, but its results are not those of the whole sequence"
        raise RuntimeError(message)


def _torch_context_parallel(rank: int, lengths: tuple[int, ...]) -> Forward:
    """torch.distributed.tensor.experimental's context_parallel around the fused operator."""
    del rank, lengths
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (RANKS,))

    def attention(*qkv_THD: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(TOKENS)  # it wants something to cut, though all is cut already
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
            heads_first = (x.transpose(0, 1).unsqueeze(0) for x in qkv_THD)
            out = scaled_dot_product_attention(*heads_first, is_causal=True, scale=SCALE)
        return out.squeeze(0).transpose(0, 1)

    return attention


_ulysses = partial(yunchang.ulysses, ours=True)
_ring = partial(yunchang.zigzag_ring, ours=True)
RIVALS = {
    "yunchang Ulysses": Rival(partial(yunchang.ulysses, ours=False), RANKS),
    "yunchang zigzag ring": Rival(partial(yunchang.zigzag_ring, ours=False), 1),
    "yunchang Ulysses, given our kernel": Rival(_ulysses, RANKS),
    "yunchang zigzag ring, given our kernel": Rival(_ring, 1),
    "yunchang Ulysses, given our kernel, packed": Rival(_ulysses, RANKS, "documents"),
    "yunchang zigzag ring, given our kernel, packed": Rival(_ring, 1, "documents"),
    "torch experimental context_parallel": Rival(_torch_context_parallel, 1),
}
