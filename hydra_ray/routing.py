"""From a global batch and its plan to what the workers are sent."""

import numpy as np

from hydra_ray.data.batches import GlobalBatch
from planner.errors import PlanError
from planner.plan import Plan
from workers.protocol import StepCommand, StepPayload


def route(
    batch: GlobalBatch, plan: Plan, *, step: int, generation: int
) -> tuple[StepCommand, StepPayload]:
    """The command every worker gets, and the payload all of them share. O(N).

    The payload holds the batch as it came from the corpus: a worker cuts its own part from it by
    the plan, so that one object serves all of them and no token is copied here.

    Raises:
        PlanError: the plan is of another batch.
    """
    if not np.array_equal(plan.lengths, batch.lengths):
        raise PlanError(
            "the plan is of another batch",
            value=f"{plan.num_sequences} sequences, {int(plan.lengths.sum())} tokens",
            limit=f"{len(batch.lengths)} sequences, {int(batch.lengths.sum())} tokens",
        )
    command = StepCommand(step=step, generation=generation, plan_digest=plan.digest())
    payload = StepPayload(
        plan=plan,
        sequence_ids=batch.sequence_ids,
        tokens=batch.tokens,
        token_offsets=batch.token_offsets,
    )
    return command, payload
