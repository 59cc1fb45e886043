"""Whatever the plan and the pool, loss and every gradient are those of one process."""

import pytest

from tests.workers.pool import (
    GQA,
    Outcome,
    gradients_of,
    payload_of,
    plan_with,
    pool_shape,
    relative_error,
    run_pool,
    trained,
)
from tests.workers.reference import reference
from workers.protocol import StepPayload, TrainingSpec

LENGTHS = [50, 7, 1, 190, 33, 2, 16, 21, 90, 3]  # 190 is far longer than most budgets below
BUDGETS = {1: 256, 2: 128, 3: 96, 4: 64, 6: 48}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def payload_for(planner: str, num_ranks: int, training: TrainingSpec) -> StepPayload:
    pool = pool_shape(num_ranks, BUDGETS[num_ranks], training)
    return payload_of(plan_with(planner, LENGTHS, pool))


@pytest.fixture(scope="module", params=["float64", "float32"])
def training(request: pytest.FixtureRequest) -> TrainingSpec:
    return TrainingSpec(seed=3, dtype=request.param, clip_grad=0.0)


@pytest.fixture(scope="module")
def truth(training: TrainingSpec) -> Outcome:
    return reference(GQA, training, [payload_for("static", 1, training)])


@pytest.mark.parametrize(
    ("planner", "num_ranks"),
    [("hydra", 1), ("hydra", 2), ("hydra", 3), ("hydra", 4), ("hydra", 6), ("static", 4)],
)
def test_loss_and_every_gradient_equal_one_process(
    planner: str, num_ranks: int, training: TrainingSpec, truth: Outcome
):
    payload = payload_for(planner, num_ranks, training)

    outcomes = run_pool(num_ranks, trained, GQA, training, [payload])

    tolerance = TOLERANCE[training.dtype]
    assert relative_error(gradients_of(outcomes), gradients_of([truth])) <= tolerance
    for outcome in outcomes:
        assert outcome.token_count == truth.token_count
        assert outcome.loss == pytest.approx(truth.loss, rel=tolerance)
