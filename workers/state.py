"""Train state by canonical name: the one form that outlives a generation.

A key is `slot/name`, or `slot/name#r.n` for part r of n of a tensor-parallel weight; a slot is
the weight or one optimizer moment. Keys do not know the pipeline stage, the HDP rank, or the
number of workers. Re-forming a generation in a kept process, copying from a peer and the
checkpoint all move tensors by these keys.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from workers.errors import StateError
from workers.megatron.naming import NamedParameter
from workers.megatron.optimizer import PoolOptimizer


@dataclass(frozen=True, slots=True, eq=False)
class TrainState:
    """Weights, moments and the number of applied steps of one process.

    Tensors have the shape of the process's part of each parameter. In bfloat16 training the
    weights here are the float32 master weights.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]


NO_STATE = TrainState(step=0, tensors={})


def keys_of(item: NamedParameter, slots: tuple[str, ...]) -> dict[str, str]:
    """The key of each slot of a parameter of this process."""
    part = ""
    num_parts = parallel_state.get_tensor_model_parallel_world_size()
    if item.split_dim is not None and num_parts > 1:
        part = f"#{parallel_state.get_tensor_model_parallel_rank()}.{num_parts}"
    return {slot: f"{slot}/{item.name}{part}" for slot in slots}


def capture(parameters: list[NamedParameter], optimizer: PoolOptimizer, step: int) -> TrainState:
    """The state of this process, whole for each of its parameters.

    The tensors are the live ones where the optimizer is not sharded: no copy. A sharded
    optimizer is gathered over the pool, which is a collective and costs the memory of all
    moments of this process's parameters.
    """
    tensors: dict[str, torch.Tensor] = {}
    for item in parameters:
        for slot, key in keys_of(item, optimizer.slots()).items():
            tensors[key] = _whole(item, optimizer, slot)
    return TrainState(step=step, tensors=tensors)


def _whole(item: NamedParameter, optimizer: PoolOptimizer, slot: str) -> torch.Tensor:
    shape = item.parameter.shape
    part = optimizer.slices(item.name).get(slot)
    if not optimizer.is_sharded:
        if part is None:
            raise StateError("the optimizer does not hold a parameter", value=item.name)
        return part.values.view(shape)
    # Each element is on exactly one rank, so a sum with zeros elsewhere is exact.
    whole = torch.zeros(shape.numel(), dtype=torch.float32, device=item.parameter.device)
    if part is not None:
        whole[part.start : part.start + part.values.numel()] = part.values
    dist.all_reduce(whole, group=_replicas(item))
    return whole.view(shape)


def _replicas(item: NamedParameter) -> dist.ProcessGroup:
    """The processes that hold the same part of this parameter."""
    if item.is_expert:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def adopt(state: TrainState, parameters: list[NamedParameter], optimizer: PoolOptimizer) -> None:
    """Make this process's model and optimizer continue from `state`.

    Raises:
        StateError: the state lacks a tensor this process needs, or its shape differs.
    """
    for item in parameters:  # all of it is checked before any of it is changed
        for key in keys_of(item, optimizer.slots()).values():
            _check_fits(state, key, item)
    with torch.no_grad():
        for item in parameters:
            _fill(item, optimizer, state)
    optimizer.set_step(state.step)


def _fill(item: NamedParameter, optimizer: PoolOptimizer, state: TrainState) -> None:
    slices = optimizer.slices(item.name)
    for slot, key in keys_of(item, optimizer.slots()).items():
        whole = state.tensors[key]
        if slot == "weight":
            item.parameter.copy_(whole)
        if slot in slices:
            start, values = slices[slot].start, slices[slot].values
            values.copy_(whole.reshape(-1)[start : start + values.numel()])


def _check_fits(state: TrainState, key: str, item: NamedParameter) -> None:
    tensor = state.tensors.get(key)
    if tensor is None or tensor.shape != item.parameter.shape:
        raise StateError(
            f"the state does not fit parameter {item.name}",
            value=None if tensor is None else tuple(tensor.shape),
            limit=tuple(item.parameter.shape),
            remedy="Resume with the model and the tensor-parallel size the state was made with.",
        )


def needed(parameters: list[NamedParameter], optimizer: PoolOptimizer) -> dict[str, torch.Tensor]:
    """A tensor without storage, of the right shape and type, for every key this process needs."""
    return {
        key: torch.empty(
            item.parameter.shape, dtype=optimizer.state_dtype(item.parameter), device="meta"
        )
        for item in parameters
        for key in keys_of(item, optimizer.slots()).values()
    }


def owned_keys(parameters: list[NamedParameter], optimizer: PoolOptimizer) -> Iterator[str]:
    """The keys this process writes to a checkpoint: every key of the run on exactly one process.

    The replicas of a parameter take turns, so that all of them write about the same.
    """
    turns: dict[bool, int] = {False: 0, True: 0}
    for item in parameters:
        replicas = _replicas(item)
        if not _is_first_of_tensor_ranks(item):
            continue
        for key in keys_of(item, optimizer.slots()).values():
            if turns[item.is_expert] % replicas.size() == replicas.rank():
                yield key
            turns[item.is_expert] += 1


def _is_first_of_tensor_ranks(item: NamedParameter) -> bool:
    """Whole weights are the same on every tensor rank: the first one writes them."""
    is_replicated = item.split_dim is None and not item.is_expert
    return not is_replicated or parallel_state.get_tensor_model_parallel_rank() == 0


def digest(state: TrainState) -> str:
    """A 128-bit BLAKE2b of step and weights, in hexadecimal. O(weights)."""
    result = hashlib.blake2b(f"{state.step}".encode(), digest_size=16)
    for key in sorted(state.tensors):
        if key.startswith("weight/"):
            tensor = state.tensors[key].detach().cpu().contiguous()
            result.update(key.encode())
            result.update(tensor.view(torch.uint8).numpy().tobytes())
    return result.hexdigest()
