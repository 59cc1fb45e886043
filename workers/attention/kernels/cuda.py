"""Flash attention on NVIDIA GPUs: the flash-attn package, or the kernel inside torch.

Both take packed sequences as they are, in float16 or bfloat16, with head dims that are equal and
multiples of 8; heads are zero-padded to that.
"""

import importlib

import torch

from workers.attention.kernels.interface import Tensor, pad_heads
from workers.attention.layout import Block

HEAD_DIM_UNIT = 8


class TorchCudaFlash:
    """`_flash_attention_forward`, the packed flash kernel that ships with torch."""

    name = "torch-cuda-flash"

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        width = v_SKE.size(-1)
        q_THD, k_SKD, v_SKE = _padded((q_THD, k_SKD, v_SKE))
        out_THE, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_SKD,
            v_SKE,
            block.queries.bounds,
            block.keys.bounds,
            block.queries.longest,
            block.keys.longest,
            0.0,
            block.causal,
            return_debug_mask=False,
            scale=scale,
        )
        return out_THE[..., :width], lse_HT

    def backward(
        self,
        d_out_THE: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKE: Tensor,
        out_THE: Tensor,
        lse_HT: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        dim, width = q_THD.size(-1), v_SKE.size(-1)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
        unused = torch.empty(0, device=q_THD.device)
        q_THD, k_SKD, v_SKE, out_THE, d_out_THE = _padded((q_THD, k_SKD, v_SKE, out_THE, d_out_THE))
        dq_THD, dk_SKD, dv_SKE = torch.ops.aten._flash_attention_backward(
            d_out_THE,
            q_THD,
            k_SKD,
            v_SKE,
            out_THE,
            lse_HT.contiguous(),
            block.queries.bounds,
            block.keys.bounds,
            block.queries.longest,
            block.keys.longest,
            0.0,
            block.causal,
            no_dropout,
            unused,
            scale=scale,
        )
        return dq_THD[..., :dim], dk_SKD[..., :dim], dv_SKE[..., :width]


class FlashAttn:
    """The varlen kernel of the flash-attn package (2.7 and later 2.x)."""

    name = "flash-attn"

    def __init__(self) -> None:
        self._package = importlib.import_module("flash_attn.flash_attn_interface")

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        width = v_SKE.size(-1)
        q_THD, k_SKD, v_SKE = _padded((q_THD, k_SKD, v_SKE))
        out_THE, lse_HT, *_ = self._package._flash_attn_varlen_forward(
            q_THD,
            k_SKD,
            v_SKE,
            block.queries.bounds,
            block.keys.bounds,
            block.queries.longest,
            block.keys.longest,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=block.causal,
        )
        return out_THE[..., :width], lse_HT

    def backward(
        self,
        d_out_THE: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKE: Tensor,
        out_THE: Tensor,
        lse_HT: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        dim, width = q_THD.size(-1), v_SKE.size(-1)
        q_THD, k_SKD, v_SKE, out_THE, d_out_THE = _padded((q_THD, k_SKD, v_SKE, out_THE, d_out_THE))
        dq_THD, dk_SKD, dv_SKE = (torch.empty_like(x) for x in (q_THD, k_SKD, v_SKE))
        self._package._flash_attn_varlen_backward(
            d_out_THE,
            q_THD,
            k_SKD,
            v_SKE,
            out_THE,
            lse_HT.contiguous(),
            dq_THD,
            dk_SKD,
            dv_SKE,
            block.queries.bounds,
            block.keys.bounds,
            block.queries.longest,
            block.keys.longest,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=block.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )
        return dq_THD[..., :dim], dk_SKD[..., :dim], dv_SKE[..., :width]


def _padded(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Equal head dims, a multiple of 8, packed in memory as the kernels want them."""
    equal = pad_heads(tensors)
    missing = -equal[0].size(-1) % HEAD_DIM_UNIT
    if missing:
        equal = tuple(torch.nn.functional.pad(tensor, (0, missing)) for tensor in equal)
    return tuple(tensor.contiguous() for tensor in equal)
