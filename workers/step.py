"""One training step of one process, up to the point where the pool must agree.

Shape legend: T tokens of this rank in one microbatch.

Megatron's own schedules run the microbatches; the loss is the sum over tokens, each counted once
across the pool, and gradients are divided by the global count when they are finalised. So the
plan never changes the objective.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from workers.groups import GroupRegistry
from workers.microbatch import LocalBatch
from workers.phases import StepClock
from workers.protocol import MicrobatchStats, StepPayload


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchLoss:
    """The loss of one microbatch on this rank, still on the device.

    Args:
        loss_sum: sum over this rank's tokens that have a label.
        token_count: how many those are.
        is_finite_N: per packed sequence, whether its part here is finite.
        sequence_ids: the ids of those sequences.
    """

    loss_sum: torch.Tensor
    token_count: torch.Tensor
    is_finite_N: torch.Tensor
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolVerdict:
    """What all ranks agree on before anyone changes a weight."""

    loss_sum: float
    token_count: int
    is_finite: bool


def forward_backward(
    modules: list[DistributedDataParallel], batches: list[LocalBatch], clock: StepClock
) -> list[MicrobatchLoss]:
    """Run every microbatch, and sum and scale the gradients over the pool.

    Args:
        modules: DDP-wrapped chunks; their main gradients hold the result.
        batches: this rank's share of every microbatch of the step.
        clock: measures the microbatches.

    Returns:
        The loss of each microbatch, on the last pipeline stage only.
    """
    for module in modules:
        module.zero_grad_buffer()
    config = modules[0].config
    finalize = config.finalize_model_grads_func

    def finalize_after_last(*args: Any, **kwargs: Any) -> None:
        clock.leave_microbatch()
        with clock.phase("sum gradients"):
            finalize(*args, **kwargs)

    config.finalize_model_grads_func = finalize_after_last
    try:
        return get_forward_backward_func()(
            forward_step_func=_forward_step(clock),
            data_iterator=[iter(batches) for _ in modules],
            model=modules,
            num_microbatches=len(batches),
            seq_length=1,  # real shapes travel with the tensors: variable_seq_lengths
            micro_batch_size=1,
            forward_only=False,
        )
    finally:
        config.finalize_model_grads_func = finalize


def _forward_step(
    clock: StepClock,
) -> Callable[[Iterator[LocalBatch], Any], tuple[torch.Tensor, Callable[..., Any]]]:
    def forward_step(batches: Iterator[LocalBatch], model: Any) -> Any:
        batch = next(batches)
        clock.enter_microbatch(batch.microbatch.index)
        with clock.phase("forward"):
            loss_T = model(
                input_ids=batch.token_ids_T[None],
                position_ids=None,
                attention_mask=None,
                labels=batch.labels_T[None],
                packed_seq_params=batch.params,
            )
        return loss_T, lambda output: _sum_loss(output, batch)

    return forward_step


def _sum_loss(
    loss_1T: torch.Tensor, batch: LocalBatch
) -> tuple[torch.Tensor, torch.Tensor, MicrobatchLoss]:
    """Sum, count and record of one microbatch, as Megatron's per-token loss wants them.

    `where` rather than a product: a masked token's loss may be anything, even not finite.
    """
    loss_T = torch.where(batch.loss_mask_T, loss_1T.view(-1), 0.0)
    count = batch.loss_mask_T.sum().to(torch.int)
    loss_sum = loss_T.sum()
    by_sequence_N = torch.zeros(
        max(1, len(batch.sequence_ids)), dtype=loss_T.dtype, device=loss_T.device
    ).index_add_(0, batch.microbatch.sequence_T, loss_T.detach())
    record = MicrobatchLoss(
        loss_sum.detach().clone(), count, by_sequence_N.isfinite(), batch.sequence_ids
    )
    return loss_sum, count, record


def nonfinite_sequences(losses: list[MicrobatchLoss]) -> tuple[int, ...]:
    """Ids of the sequences whose loss is not finite on this rank."""
    found: list[int] = []
    for loss in losses:
        finite = loss.is_finite_N.tolist()
        found += [i for i, ok in zip(loss.sequence_ids, finite, strict=False) if not ok]
    return tuple(found)


def agree(
    losses: list[MicrobatchLoss], grad_norm: float, registry: GroupRegistry, device: torch.device
) -> PoolVerdict:
    """One sum over all processes: the global loss, and whether everything is finite anywhere.

    It is the last collective before the weights change, so either all ranks pass it or none
    applies the step. Only the first tensor rank of the last stage counts tokens.
    """
    counts = registry.place.tensor == 0
    loss_sum = sum(float(loss.loss_sum) for loss in losses) if counts else 0.0
    tokens = sum(int(loss.token_count) for loss in losses) if counts else 0
    is_bad = bool(nonfinite_sequences(losses)) or not math.isfinite(grad_norm)
    total = torch.tensor([loss_sum, tokens, is_bad], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    loss, count, bad = total.tolist()
    return PoolVerdict(
        loss_sum=loss, token_count=int(count), is_finite=math.isfinite(loss) and not bad
    )


def labelled_tokens(payload: StepPayload) -> int:
    """Tokens of the batch that predict another one: all but the last of each sequence."""
    return int((payload.plan.lengths - 1).sum())


def microbatch_stats(batches: list[LocalBatch], clock: StepClock) -> tuple[MicrobatchStats, ...]:
    """What each microbatch of the step cost this rank."""
    return tuple(_stats(batch, clock) for batch in batches)


def _stats(batch: LocalBatch, clock: StepClock) -> MicrobatchStats:
    microbatch = batch.microbatch
    counters = microbatch.counters
    return MicrobatchStats(
        microbatch=microbatch.index,
        degree=microbatch.groups.degree,
        ulysses=microbatch.groups.ulysses,
        tokens=0 if microbatch.idle else len(batch.token_ids_T),
        wall_s=clock.wall_s[microbatch.index],
        cpu_s=clock.cpu_s[microbatch.index],
        kernel_s=counters.kernel_s,
        exposed_wait_s=counters.exposed_wait_s,
        bytes_sent=dict(counters.bytes_sent),
    )
