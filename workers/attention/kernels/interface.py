"""What every kernel does: one block of attention over packed sequences, with its LSE.

Shape legend: T packed queries, S packed keys, H query heads, K key-value heads (H is a multiple),
D head dim of queries and keys, E head dim of values.
"""

from typing import Protocol

import torch

from workers.attention.layout import Block

Tensor = torch.Tensor


class Kernel(Protocol):
    """softmax(scale Q K^T) V for each segment of a block, and its gradients."""

    name: str

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """One block.

        Returns:
            out_THE in the input's precision, and lse_HT, the natural logarithm of each query's
            sum of exponentials: float32, or float64 for float64 inputs.
        """
        ...

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
        """Gradients of the block's queries, keys and values.

        `out_THE` and `lse_HT` may be those of a larger softmax that this block is a part of: the
        probabilities exp(scale q k - lse) and the row sums d_out * out are then the larger one's,
        so the gradients of its blocks just add up.
        """
        ...


def pad_heads(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Zero-pad the last dim of each to the widest: kernels want one head dim for q, k and v.

    Zeros add nothing to q k, and the outputs they add are cut off again. MLA needs this.
    """
    width = max(tensor.size(-1) for tensor in tensors)
    return tuple(
        torch.nn.functional.pad(tensor, (0, width - tensor.size(-1)))
        if tensor.size(-1) < width
        else tensor
        for tensor in tensors
    )
