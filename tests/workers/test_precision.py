"""bfloat16 training with float32 master weights follows float32."""

from dataclasses import replace

import numpy as np
import pytest

from tests.workers.pool import (
    GQA,
    command_of,
    joined,
    payload_of,
    plan_with,
    pool_shape,
    run_pool,
)
from workers.protocol import TrainingSpec

TRAINING = TrainingSpec(seed=3, lr=3e-3)


def losses(rank: int, world_size: int, port: int, training: TrainingSpec) -> list[float]:
    """Six steps on one batch."""
    runtime = joined(rank, world_size, port, GQA, training)
    payload = payload_of(plan_with("hydra", [50, 7, 1, 190], pool_shape(2, 128, training)))
    results = [runtime.run_step(command_of(payload.plan, step), payload) for step in range(1, 7)]
    return [result.loss_sum / result.token_count for result in results]


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_bfloat16_follows_float32(distributed_optimizer: bool):
    narrow = replace(TRAINING, dtype="bfloat16", distributed_optimizer=distributed_optimizer)
    expected = run_pool(2, losses, TRAINING)[0]

    found = run_pool(2, losses, narrow)[0]

    assert expected[-1] < expected[0] - 1.0  # it learns, so that following it means something
    np.testing.assert_allclose(found, expected, rtol=1e-2)
