"""yunchang's (long-context-attention) layers as calls to time, with the kernel our engine uses.

It has no kernel for CPUs with a backward of its own, so ours is put where it calls flash-attn.
What that costs it beyond our own calls: copies of gradients into the buffers it hands out.

Shape legend: T tokens of this rank, S those a kernel sees, H heads, D head dim, N sequences.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine_speed import SCALE
from workers.attention.counters import Counters
from workers.attention.engine import context_parallel_attention
from workers.attention.kernels import choose_kernel
from workers.attention.layout import Block, CPGroups, Segments

Tensor = torch.Tensor
Forward = Callable[..., Tensor]
CPU = torch.device("cpu")
KERNEL = choose_kernel("cpu", torch.float32)


def _require_yunchang() -> None:
    if importlib.util.find_spec("yunchang") is None:
        message = "yunchang is not installed"
        raise ModuleNotFoundError(message)


def ulysses(rank: int, lengths: tuple[int, ...], *, ours: bool) -> Forward:
    """Its Ulysses layer over the packed batch; without ours, with the only kernel it has here."""
    del rank
    _require_yunchang()
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    layer = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_MATH)
    if ours:
        layer.attn_fn = partial(_packed_attention, lengths)
    return partial(_in_a_batch, layer)


def _in_a_batch(layer: Forward, *qkv_THD: Tensor) -> Tensor:
    out_1THD = layer(*(x.unsqueeze(0) for x in qkv_THD), softmax_scale=SCALE, causal=True)
    return out_1THD.squeeze(0)


def _packed_attention(lengths: tuple[int, ...], *qkv_1SHD: Tensor, **_: object) -> Tensor:
    """Each sequence of the whole stream attends to itself, by our engine at degree 1."""
    out_SHD = context_parallel_attention(
        *(x.squeeze(0) for x in qkv_1SHD),
        lengths=lengths,
        groups=CPGroups(),
        scale=SCALE,
        counters=Counters(),
    )
    return out_SHD.unsqueeze(0)


def zigzag_ring(rank: int, lengths: tuple[int, ...], *, ours: bool) -> Forward:
    """Its zigzag ring: the plain one for one sequence, the one for packed sequences else."""
    _require_yunchang()
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType
    from yunchang.ring import zigzag_ring_flash_attn as plain
    from yunchang.ring import zigzag_ring_flash_attn_varlen as packed

    size = dist.get_world_size()
    set_seq_parallel_pg(1, size, rank, size)
    if len(lengths) > 1:
        vars(packed)["_flash_attn_varlen_forward"] = _varlen_forward
        vars(packed)["_flash_attn_varlen_backward"] = _varlen_backward
        bounds = Segments.of(tuple(n // size for n in lengths), CPU).bounds
        return partial(_packed_ring, packed.zigzag_ring_flash_attn_varlen_func, bounds)
    if ours:
        stages = {"fwd-only": _flash_forward, "bwd-only": _flash_backward}
        plain.select_flash_attn_impl = lambda _, stage: stages[stage]
    layer = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.TORCH_FLASH)
    return partial(_in_a_batch, layer)


def _packed_ring(function: Forward, bounds: Tensor, *qkv_THD: Tensor) -> Tensor:
    longest = int(bounds.diff().max())
    return function(
        *qkv_THD, bounds, longest, softmax_scale=SCALE, causal=True, group=dist.group.WORLD
    )


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, _: float, scale: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """[1, S, H, D] and [1, H, S], as a block of its ring wants them."""
    block = _block((q.size(1),), (k.size(1),), causal=options["causal"])
    out_SHD, lse_HS = KERNEL.forward(q[0], k[0], v[0], block, scale)
    return out_SHD.unsqueeze(0), lse_HS.unsqueeze(0)


def _flash_backward(*arguments: Any, **_: Any) -> None:
    """Fills the three buffers it is given."""
    d_out, q, k, v, out, lse = (x[0] for x in arguments[:6])
    block = _block((q.size(0),), (k.size(0),), causal=arguments[11])
    gradients = KERNEL.backward(d_out, q, k, v, out, lse, block, arguments[10])
    for buffer, gradient in zip(arguments[6:9], gradients, strict=True):
        buffer[0].copy_(gradient)


def _varlen_forward(*arguments: Any, causal: bool, **_: Any) -> tuple[Any, ...]:
    """Of flash-attn's eight results the two its ring uses: [S, H, D], and [N, H, longest]."""
    q, k, v, q_bounds, k_bounds, longest, _longest_key, _dropout, scale = arguments
    block = _block(_lengths(q_bounds), _lengths(k_bounds), causal=causal)
    out, lse_HS = KERNEL.forward(q, k, v, block, scale)
    lse_NHS = lse_HS.new_zeros(len(block.queries.lengths), lse_HS.size(0), longest)
    for sequence, part in enumerate(lse_HS.split(block.queries.lengths, dim=1)):
        lse_NHS[sequence, :, : part.size(1)] = part
    return out, *(None,) * 4, lse_NHS, None, None


def _varlen_backward(*arguments: Any, **_: Any) -> None:
    """Fills the three buffers it is given."""
    d_out, q, k, v, out, lse_NHS, *buffers = arguments[:9]
    scale, causal = arguments[14:16]
    block = _block(_lengths(arguments[9]), _lengths(arguments[10]), causal=causal)
    parts = zip(lse_NHS, block.queries.lengths, strict=True)
    lse_HS = torch.cat([lse_HS[:, :length] for lse_HS, length in parts], dim=1)
    gradients = KERNEL.backward(d_out, q, k, v, out, lse_HS, block, scale)
    for buffer, gradient in zip(buffers, gradients, strict=True):
        buffer.copy_(gradient)


def _lengths(bounds: Tensor) -> tuple[int, ...]:
    return tuple(bounds.diff().tolist())


def _block(queries: tuple[int, ...], keys: tuple[int, ...], *, causal: bool) -> Block:
    return Block(Segments.of(queries, CPU), Segments.of(keys, CPU), causal=causal)
