"""A worker refuses what is not for it, with a typed error and before any collective."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import InputError
from planner.plan import Plan
from tests.workers.pool import (
    GQA,
    command_of,
    joined,
    payload_of,
    plan_with,
    pool_shape,
    run_pool,
)
from workers.errors import (
    DigestMismatchError,
    GenerationError,
    NotJoinedError,
    StaleCommandError,
    WorkerError,
)
from workers.protocol import ModelSpec, StepCommand, StepPayload, TrainingSpec
from workers.runtime import WorkerRuntime

TRAINING = TrainingSpec(seed=3)
POOL = pool_shape(2, 128, TRAINING)
PLAN = plan_with("hydra", [50, 7, 1, 190], POOL)


def other_plan(plan: Plan) -> Plan:
    return replace(plan, members=plan.members[::-1].copy())


Corrupt = Callable[[StepCommand, StepPayload], tuple[StepCommand, StepPayload]]
CORRUPTIONS: dict[str, tuple[Corrupt, type[WorkerError]]] = {
    "digest": (lambda c, p: (replace(c, plan_digest="0" * 32), p), DigestMismatchError),
    "plan": (lambda c, p: (c, replace(p, plan=other_plan(p.plan))), DigestMismatchError),
    "next step": (lambda c, p: (replace(c, step=c.step + 1), p), StaleCommandError),
    "same step": (lambda c, p: (replace(c, step=c.step - 1), p), StaleCommandError),
    "generation": (lambda c, p: (replace(c, generation=0), p), GenerationError),
}


def refuse_then_train(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Rank 0 gets every corruption, alone: a collective would hang. Then both train."""
    runtime = joined(rank, world_size, port, GQA, TRAINING)
    payload = payload_of(PLAN)
    assert runtime.run_step(command_of(PLAN), payload).applied
    before = runtime.fingerprint()
    refused = {}
    for name, (corrupt, _) in CORRUPTIONS.items() if rank == 0 else ():
        try:
            runtime.run_step(*corrupt(command_of(PLAN, step=2), payload))
        except WorkerError as error:
            refused[name] = type(error).__name__
    assert runtime.fingerprint() == before
    assert runtime.run_step(command_of(PLAN, step=2), payload).applied
    return refused


def test_corrupted_commands_are_refused_and_change_nothing():
    refused, _ = run_pool(2, refuse_then_train)

    assert refused == {name: kind.__name__ for name, (_, kind) in CORRUPTIONS.items()}


def test_a_worker_outside_of_a_generation_refuses_a_step():
    runtime = WorkerRuntime(GQA, TRAINING)

    with pytest.raises(NotJoinedError):
        runtime.run_step(command_of(PLAN), payload_of(PLAN))


@pytest.mark.parametrize(
    ("model", "training"),
    [
        (GQA, replace(TRAINING, tensor=3)),
        (GQA, replace(TRAINING, pipeline=3)),
        (replace(GQA, num_experts=4), replace(TRAINING, expert=3)),
        (replace(GQA, num_experts=4), replace(TRAINING, tensor=2)),
        (replace(GQA, output_gate=True), replace(TRAINING, tensor=4)),
        (GQA, replace(TRAINING, distributed_optimizer=True, optimizer="sgd")),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(model: ModelSpec, training: TrainingSpec):
    with pytest.raises(InputError):
        WorkerRuntime(model, training)


def poisoned_step(rank: int, world_size: int, port: int) -> tuple[bool, tuple[int, ...], bool]:
    """A step in which token 5 has an infinite embedding."""
    import torch  # noqa: PLC0415

    runtime = joined(rank, world_size, port, GQA, TRAINING)
    embedding = next(
        item.parameter
        for item in runtime._here()[0].parameters
        if item.name == "embedding.word_embeddings.weight"
    )
    with torch.no_grad():
        embedding[5] = torch.inf
    payload = payload_of(PLAN)
    tokens = np.where(payload.tokens == 5, 6, payload.tokens)
    tokens[payload.token_offsets[1] + 2] = 5  # in the second sequence only, whose id is 101
    before = runtime.fingerprint()
    result = runtime.run_step(command_of(PLAN), replace(payload, tokens=tokens))
    return result.applied, result.nonfinite_sequences, runtime.fingerprint() == before


def test_a_loss_that_is_not_finite_names_its_sequence_and_no_rank_applies_the_step():
    outcomes = run_pool(2, poisoned_step)

    assert [applied for applied, _, _ in outcomes] == [False, False]
    assert {i for _, ids, _ in outcomes for i in ids} == {101}
    assert all(unchanged for _, _, unchanged in outcomes)
