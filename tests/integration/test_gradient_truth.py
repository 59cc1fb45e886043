"""Loss and gradients of batches that come from the real loader, planners and router."""

import pytest

from hydra_ray.data.batches import DataCursor, GlobalBatches
from hydra_ray.data.index import SequenceIndex
from hydra_ray.routing import route
from planner.registry import get_planner
from planner.validate import validate
from tests.integration.conftest import write_corpus
from tests.workers.pool import (
    GQA,
    gradients_of,
    pool_shape,
    relative_error,
    run_pool,
    tiny_cost,
    trained,
)
from tests.workers.reference import reference
from workers.protocol import StepPayload, TrainingSpec

LENGTHS = [1, 7, 251, 33, 2, 15, 64, 90, 3, 29]  # 251 is far longer than most budgets below
BUDGETS = {1: 512, 2: 160, 3: 96, 4: 72, 6: 48}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory):
    path = write_corpus(tmp_path_factory.mktemp("truth") / "corpus.parquet", LENGTHS)
    with SequenceIndex(str(path)) as index:
        batch = GlobalBatches(index, seed=4, batch_tokens=sum(LENGTHS)).next(DataCursor())
    assert sorted(batch.lengths.tolist()) == sorted(LENGTHS)
    return batch


def payload_for(batch, planner: str, num_ranks: int, training: TrainingSpec) -> StepPayload:
    pool = pool_shape(num_ranks, BUDGETS[num_ranks], training)
    plan = get_planner(planner).plan(batch.lengths, pool, tiny_cost(GQA))
    validate(plan)
    return route(batch, plan, step=1, generation=1)[1]


@pytest.fixture(scope="module", params=["float64", "float32"])
def training(request: pytest.FixtureRequest) -> TrainingSpec:
    return TrainingSpec(seed=3, dtype=request.param, clip_grad=0.0)


@pytest.fixture(scope="module")
def truth(batch, training: TrainingSpec):
    return reference(GQA, training, [payload_for(batch, "static", 1, training)])


@pytest.mark.parametrize(
    ("planner", "num_ranks"),
    [
        ("hydra", 1),
        ("hydra", 2),
        ("hydra", 3),
        ("hydra", 4),
        ("hydra", 6),
        ("static", 2),
        ("static", 4),
    ],
)
def test_a_planned_batch_gives_the_gradients_of_one_process(
    batch, planner, num_ranks, training, truth
):
    payload = payload_for(batch, planner, num_ranks, training)
    degrees = set(payload.plan.group_size.tolist())
    assert max(degrees) > 1 or num_ranks == 1

    outcomes = run_pool(num_ranks, trained, GQA, training, [payload])

    tolerance = TOLERANCE[training.dtype]
    assert relative_error(gradients_of(outcomes), gradients_of([truth])) <= tolerance
    for outcome in outcomes:
        assert outcome.token_count == truth.token_count
        assert outcome.loss == pytest.approx(truth.loss, rel=tolerance)
