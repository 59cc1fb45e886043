"""From a step's payload to what one rank feeds its model in one microbatch.

Shape legend: N sequences of the group, P padded packed tokens of the group, T tokens of this
rank (P / degree).
"""

from dataclasses import dataclass

import numpy as np
import torch

from planner.plan import Plan
from planner.pool import IntArray
from workers.attention.counters import Counters
from workers.attention.layout import zigzag_index
from workers.groups import GroupRegistry
from workers.megatron.context import Microbatch, MicrobatchParams
from workers.protocol import StepPayload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalBatch:
    """One rank's share of one microbatch.

    Args:
        token_ids_T: [T] int64 input tokens; padding is token 0.
        labels_T: [T] int64 the next token of the same sequence.
        loss_mask_T: [T] bool, True where there is a next token.
        sequence_ids: ids of the packed sequences; empty on an idle rank.
        params: what Megatron's layers are told, our microbatch among it.
    """

    token_ids_T: torch.Tensor
    labels_T: torch.Tensor
    loss_mask_T: torch.Tensor
    sequence_ids: tuple[int, ...]
    params: MicrobatchParams

    @property
    def microbatch(self) -> Microbatch:
        """The microbatch as layers see it."""
        assert self.params.microbatch is not None  # noqa: S101 - set by this module alone
        return self.params.microbatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Packed:
    """The whole group's tokens, padded and packed, before they are cut over its ranks."""

    token_ids_P: IntArray
    labels_P: IntArray
    is_real_P: np.ndarray[tuple[int], np.dtype[np.bool_]]
    has_label_P: np.ndarray[tuple[int], np.dtype[np.bool_]]
    sequence_P: IntArray


def local_batches(
    payload: StepPayload, registry: GroupRegistry, device: torch.device, *, keep_events: bool
) -> list[LocalBatch]:
    """This rank's share of every microbatch of the step, in order.

    Args:
        payload: the step.
        registry: this rank's place and groups.
        device: where the model is.
        keep_events: log what the engine does, for a trace.

    Cost: O(tokens of all groups this rank is in); the chunks of a pipeline stage share the list.
    """
    counters = [Counters(keep_events=keep_events) for _ in range(payload.plan.num_microbatches)]
    return [
        _local_batch(payload, index, registry, device, counters[index])
        for index in range(payload.plan.num_microbatches)
    ]


def _local_batch(
    payload: StepPayload,
    index: int,
    registry: GroupRegistry,
    device: torch.device,
    counters: Counters,
) -> LocalBatch:
    plan = payload.plan
    group = plan.group_of_rank(index, registry.place.hdp)
    if group is None or not len(plan.group_members(group)):
        return _idle(plan, index, registry, device, counters)
    start, size = int(plan.group_start[group]), int(plan.group_size[group])
    members = plan.group_members(group)
    padded = tuple(plan.pool.padded(int(length), size) for length in plan.lengths[members])
    packed = _pack(payload, members, padded)
    mine = np.asarray(zigzag_index(padded, size, registry.place.hdp - start))
    groups = registry.of(start, size, int(plan.group_ulysses[group]))
    return LocalBatch(
        token_ids_T=_on(packed.token_ids_P[mine], device),
        labels_T=_on(packed.labels_P[mine], device),
        loss_mask_T=_on(packed.has_label_P[mine], device),
        sequence_ids=tuple(int(i) for i in payload.sequence_ids[members]),
        params=_params(
            Microbatch(
                index=index,
                groups=groups,
                padded_lengths=padded,
                sequence_T=_on(packed.sequence_P[mine], device),
                real_T=_on(packed.is_real_P[mine], device),
                idle=False,
                counters=counters,
            ),
            device,
        ),
    )


def _pack(payload: StepPayload, members: IntArray, padded: tuple[int, ...]) -> _Packed:
    total = sum(padded)
    token_ids_P = np.zeros(total, dtype=np.int64)
    labels_P = np.zeros(total, dtype=np.int64)
    is_real_P = np.zeros(total, dtype=np.bool_)
    has_label_P = np.zeros(total, dtype=np.bool_)
    start = 0
    for member, width in zip(members, padded, strict=True):
        first, last = payload.token_offsets[member], payload.token_offsets[member + 1]
        tokens = payload.tokens[first:last]
        end = start + len(tokens)
        token_ids_P[start:end] = tokens
        labels_P[start : end - 1] = tokens[1:]
        is_real_P[start:end] = True
        has_label_P[start : end - 1] = True  # the last token of a sequence predicts nothing
        start += width
    return _Packed(
        token_ids_P=token_ids_P,
        labels_P=labels_P,
        is_real_P=is_real_P,
        has_label_P=has_label_P,
        sequence_P=np.repeat(np.arange(len(padded)), padded),
    )


def _idle(
    plan: Plan, index: int, registry: GroupRegistry, device: torch.device, counters: Counters
) -> LocalBatch:
    """A shortest possible sequence without labels: the rank joins every collective.

    Zero tokens would not do: Megatron's attention cannot reshape an empty tensor.
    """
    num_tokens = plan.pool.padded(1, 1)
    zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    false_T = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    microbatch = Microbatch(
        index=index,
        groups=registry.of(registry.place.hdp, 1, 1),
        padded_lengths=(num_tokens,),
        sequence_T=zeros_T,
        real_T=false_T,
        idle=True,
        counters=counters,
    )
    return LocalBatch(
        token_ids_T=zeros_T,
        labels_T=zeros_T,
        loss_mask_T=false_T,
        sequence_ids=(),
        params=_params(microbatch, device),
    )


def _params(microbatch: Microbatch, device: torch.device) -> MicrobatchParams:
    bounds = np.concatenate(([0], np.cumsum(microbatch.padded_lengths)))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    positions = _table_length(max(microbatch.padded_lengths))
    return MicrobatchParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=positions,
        max_seqlen_kv=positions,
        cp_group=microbatch.groups.cp,
        microbatch=microbatch,
    )


def _table_length(longest: int) -> int:
    """How many positions Megatron is told to make rotary angles for.

    It keeps the last 32 tables it made, one a length, so lengths that differ every microbatch
    would keep 32 of the longest. Rounded to powers of two there are few, together twice the
    longest. One more makes it odd: a table as long as all packed tokens, which are even, would
    be taken for one position a packed token.
    """
    return (1 << (longest - 1).bit_length()) + 1


def _on(array: np.ndarray[tuple[int], np.dtype[np.generic]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
