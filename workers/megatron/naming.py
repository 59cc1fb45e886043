"""Canonical names: what a parameter is called whatever the pipeline and expert layout.

Megatron numbers layers within a pipeline chunk and experts within a rank. Here both are global,
so that a name means the same weights in any layout. Initialisation, state transfer and
checkpoints all go by these names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameter:
    """A parameter of this process.

    Args:
        name: its canonical name.
        parameter: the parameter itself, this process's tensor-parallel shard of it.
        split_dim: the dim split over tensor ranks; None where it is whole.
        is_expert: True for routed experts; each is whole, on one expert rank of its block.
    """

    name: str
    parameter: torch.nn.Parameter
    split_dim: int | None
    is_expert: bool


def canonical_parameters(chunks: list[torch.nn.Module]) -> list[NamedParameter]:
    """The parameters of all model chunks of this process, sorted by canonical name.

    Args:
        chunks: bare GPTModels, in virtual-pipeline order.
    """
    named = [item for chunk in chunks for item in _of_chunk(chunk)]
    return sorted(named, key=lambda item: item.name)


def _of_chunk(chunk: torch.nn.Module) -> Iterator[NamedParameter]:
    for name, parameter in chunk.named_parameters():
        is_expert = ".local_experts." in name
        split = getattr(parameter, "tensor_model_parallel", False) and not is_expert
        yield NamedParameter(
            name=_canonical(name, chunk),
            parameter=parameter,
            split_dim=getattr(parameter, "partition_dim", None) if split else None,
            is_expert=is_expert,
        )


def _canonical(name: str, chunk: torch.nn.Module) -> str:
    layer = _LAYER.match(name)
    if layer is None:
        return name
    number = chunk.decoder.layers[int(layer[1])].layer_number - 1  # type: ignore[union-attr, index]
    name = f"layers.{number}.{name[layer.end() :]}"
    return _EXPERT.sub(lambda found: f"experts.{_global_expert(int(found[1]), chunk)}.", name)


def _global_expert(local: int, chunk: torch.nn.Module) -> int:
    per_rank = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()  # type: ignore[union-attr]
    return int(parallel_state.get_expert_model_parallel_rank() * per_rank + local)
