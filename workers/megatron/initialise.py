"""Seeded initialisation that does not depend on the layout.

Each matrix is drawn from a generator seeded by the run's seed and a CRC of its canonical name,
whole, on the CPU; a tensor-parallel rank then takes its part. So tp, pp, ep and the number of
workers never change the weights a run starts from, and a worker needs nobody to start.
"""

import math
import zlib

import torch
from megatron.core import parallel_state

from workers.megatron.naming import NamedParameter

_STD = 0.02
_OUTPUT_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")


def initialise(parameters: list[NamedParameter], *, seed: int, num_layers: int) -> None:
    """Fill every matrix; vectors keep the ones and zeros their modules gave them.

    Standard deviation 0.02, divided by sqrt(2 * num_layers) for the projections that write into
    the residual stream (GPT-2). Cost: O(whole matrix) on each rank that holds a part of it.
    """
    for item in parameters:
        if item.parameter.dim() > 1:
            std = _STD
            if item.name.endswith(_OUTPUT_PROJECTIONS):
                std /= math.sqrt(2 * num_layers)
            item.parameter.data.copy_(_draw(item, seed, std))


def _draw(item: NamedParameter, seed: int, std: float) -> torch.Tensor:
    shape = list(item.parameter.shape)
    num_parts = parallel_state.get_tensor_model_parallel_world_size()
    if item.split_dim is not None:
        shape[item.split_dim] *= num_parts
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{item.name}".encode()))
    whole = torch.randn(shape, generator=generator, dtype=torch.float32) * std
    if item.split_dim is None or num_parts == 1:
        return whole
    return tensor_part(
        whole, item.name, item.split_dim, parallel_state.get_tensor_model_parallel_rank(), num_parts
    )


def tensor_part(
    whole: torch.Tensor, name: str, dim: int, rank: int, num_parts: int
) -> torch.Tensor:
    """The part of a whole matrix that tensor rank `rank` of `num_parts` holds.

    A gated first layer stacks gate and up projection, and each is split on its own.
    """
    if name.endswith("linear_fc1.weight"):
        halves = whole.chunk(2, dim)
        return torch.cat([half.chunk(num_parts, dim)[rank] for half in halves], dim)
    return whole.chunk(num_parts, dim)[rank]
