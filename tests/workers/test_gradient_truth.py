"""Whatever the plan and the pool, loss and every gradient are those of one process."""

import numpy as np
import pytest

from tests.workers.pool import (
    GQA,
    assembled,
    gradients,
    payload_of,
    plan_with,
    pool_shape,
    run_pool,
)
from tests.workers.reference import reference
from workers.protocol import StepPayload, TrainingSpec

LENGTHS = [50, 7, 1, 190, 33, 2, 16, 21, 90, 3]  # 190 is far longer than most budgets below
BUDGETS = {1: 256, 2: 128, 3: 96, 4: 64, 6: 48}
RELATIVE_ERROR = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module", params=["float64", "float32"])
def training(request: pytest.FixtureRequest) -> TrainingSpec:
    return TrainingSpec(seed=3, dtype=request.param)


@pytest.fixture(scope="module")
def truth(training: TrainingSpec):
    return reference(
        GQA, training, payload_of(plan_with("static", LENGTHS, pool_shape(1, 256, training)))
    )


def payload_for(planner: str, num_ranks: int, training: TrainingSpec) -> StepPayload:
    pool = pool_shape(num_ranks, BUDGETS[num_ranks], training)
    return payload_of(plan_with(planner, LENGTHS, pool))


@pytest.mark.parametrize(
    ("planner", "num_ranks"),
    [("hydra", 1), ("hydra", 2), ("hydra", 3), ("hydra", 4), ("hydra", 6), ("static", 4)],
)
def test_loss_and_every_gradient_equal_one_process(planner, num_ranks, training, truth):
    payload = payload_for(planner, num_ranks, training)

    outcomes = run_pool(num_ranks, gradients, GQA, training, payload)

    assert_same(outcomes, truth, RELATIVE_ERROR[training.dtype])


def assert_same(outcomes, truth, tolerance, num_tensor_ranks=1):
    expected = {part.name: part.values for part in truth.parts}
    found = assembled(outcomes, num_tensor_ranks)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        error = np.abs(found[name] - values).max() / np.abs(values).max()
        assert error <= tolerance, f"{name}: {error}"
    for outcome in outcomes:
        assert outcome.token_count == truth.token_count
        assert outcome.loss == pytest.approx(truth.loss, rel=tolerance)
