"""What came of a step: its line of steps.jsonl, or why no worker applied it."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hydra_ray.data.batches import DataCursor
from hydra_ray.driver.errors import NonFiniteLossError
from hydra_ray.driver.preparation import PreparedStep
from hydra_ray.rundir import RunDirectory, last
from planner.cost import CostModel
from planner.iteration import iteration_s, rank_loads_s
from planner.plan import Plan
from workers.protocol import StepResult


def step_record(
    prepared: PreparedStep, results: Sequence[StepResult], cost: CostModel, *, wall_s: float
) -> dict[str, Any]:
    """The line of one applied step.

    `results` are the reports that came; loss and gradient norm are global, so any one has them.
    Without a report (its worker died after applying the step) they are null.
    """
    plan, batch, key = prepared.plan, prepared.batch, prepared.key
    report = results[0] if results else None
    tokens = int(batch.lengths.sum())
    loss = report.loss_sum / report.token_count if report and report.token_count else None
    loads_s = rank_loads_s(plan, cost.table(plan.pool))
    return {
        "step": key.step,
        "time": time.time(),
        "loss": loss,
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s if wall_s else None,
        "wall_s": wall_s,
        "step_s": max((result.step_s for result in results), default=None),
        "plan_s": prepared.plan_s,
        "grad_norm": report.grad_norm if report else None,
        "lr": report.lr if report else None,
        "num_sequences": plan.num_sequences,
        "num_microbatches": plan.num_microbatches,
        "degrees": sequences_by_degree(plan),
        "load_max_over_mean": float(loads_s.max(axis=1).sum() / loads_s.mean(axis=1).sum()),
        "idle_ranks": int((loads_s == 0).sum()),
        "predicted_s": iteration_s(plan, cost),
        "generation": key.generation,
        "num_ranks": key.pool.num_ranks,
        "peak_bytes": max((result.peak_bytes for result in results), default=None),
        "bytes_sent": bytes_sent(results),
        "sequence_ids": batch.sequence_ids.tolist(),
        "cursor_after": batch.cursor_after.to_dict(),
    }


def cursor_after(directory: RunDirectory, step: int) -> DataCursor:
    """Where the batch after `step` starts, as the run wrote it down. O(steps)."""
    record = last(directory.steps(), step=step)
    if record is None:
        raise LookupError(f"step {step} is not in steps.jsonl")
    return DataCursor.from_dict(record["cursor_after"])


def sequences_by_degree(plan: Plan) -> dict[str, int]:
    """How many sequences of the plan have each CP degree."""
    counts = np.bincount(plan.group_size, weights=np.diff(plan.group_offsets))
    return {str(degree): int(count) for degree, count in enumerate(counts) if count}


def bytes_sent(results: Sequence[StepResult]) -> dict[str, int]:
    """Bytes sent by all ranks in the step, by kind of collective."""
    total: dict[str, int] = {}
    for result in results:
        for microbatch in result.microbatches:
            for kind, num_bytes in microbatch.bytes_sent.items():
                total[kind] = total.get(kind, 0) + num_bytes
    return total


def refuse_nonfinite(step: int, results: Sequence[StepResult]) -> None:
    """Stop at a step that no worker applied.

    Raises:
        NonFiniteLossError: a loss or gradient of `step` was not finite.
    """
    refused = [result for result in results if not result.applied]
    if not refused:
        return
    ids = sorted({i for result in refused for i in result.nonfinite_sequences})
    raise NonFiniteLossError(
        f"the loss or gradient of step {step} is not finite; the step was not applied",
        value=f"sequence ids {ids}" if ids else f"gradient norm {refused[0].grad_norm}",
        limit="finite numbers",
        remedy="Look at these sequences, lower optimizer.lr or set optimizer.clip_grad; "
        "then continue from the last checkpoint with --resume.",
    )
