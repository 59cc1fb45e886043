"""Every parallel axis at once, under groups that change every microbatch: the truth table.

Each case trains three steps whose microbatches all have other layouts, on a pool of four HDP
ranks (three, six). Loss, every gradient and the weights after the steps equal stock Megatron's in
one process (`reference`). A few cases run in the suite, all 48 and the odd pools with `-m slow`.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cache

import pytest

from tests.workers.layouts import POOL_OF_3, POOL_OF_4, POOL_OF_4_IDLE, POOL_OF_6, plan_of
from tests.workers.pool import (
    GQA,
    Outcome,
    gradients_of,
    payload_of,
    pool_shape,
    relative_error,
    run_pool,
    trained,
    weights_of,
)
from tests.workers.reference import reference
from workers.protocol import ModelSpec, StepPayload, TrainingSpec

TOLERANCE = {"float64": 1e-9, "float32": 2e-6}

DENSE = {
    "gqa": replace(GQA, num_layers=4),
    "mla": replace(
        GQA,
        num_layers=4,
        attention="mla",
        output_gate=True,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_rope_dim=8,
        v_head_dim=16,
        rope_scaling_factor=4.0,
    ),
}
EXPERTS = {
    "num_experts": 4,
    "expert_top_k": 2,
    "expert_ffn_hidden_size": 64,
    "shared_expert_ffn_hidden_size": 64,
    "aux_loss_coeff": 1e-2,
}
# Near-zero gradients make Adam with its usual eps amplify rounding; Megatron's clipping norm is
# float32 whatever the weights are.
TRAINING = TrainingSpec(seed=3, dtype="float64", eps=1e-3, clip_grad=0.0)


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    attention: str
    experts: bool
    pipeline: int
    chunks: int
    tensor: int
    recompute: str
    layout: str = "4"
    distributed_optimizer: bool = False
    dtype: str = "float64"

    def __str__(self) -> str:
        parts = [self.attention, "moe" if self.experts else "dense"]
        parts += [f"pp{self.pipeline}v{self.chunks}", f"tp{self.tensor}", self.recompute]
        extra = ["dist"] * self.distributed_optimizer + [self.dtype] * (self.dtype != "float64")
        return "-".join([*parts, f"pool{self.layout}", *extra])

    @property
    def model(self) -> ModelSpec:
        dense = DENSE[self.attention]
        return replace(dense, **EXPERTS) if self.experts else dense

    @property
    def training(self) -> TrainingSpec:
        return replace(
            TRAINING,
            dtype=self.dtype,
            tensor=self.tensor,
            sequence_parallel=self.tensor > 1,
            pipeline=self.pipeline,
            chunks=self.chunks,
            expert=2 if self.experts and self.num_ranks % 2 == 0 else 1,
            recompute=self.recompute,
            distributed_optimizer=self.distributed_optimizer,
        )

    @property
    def num_ranks(self) -> int:
        return int(self.layout[0])

    def payloads(self) -> list[StepPayload]:
        pool = pool_shape(self.num_ranks, 128, self.training)
        layouts = {
            "3": [POOL_OF_3] * 3,
            "4": [POOL_OF_4, POOL_OF_4_IDLE, POOL_OF_4],
            "4*": [POOL_OF_4] * 3,  # for few heads a rank: no Ulysses degree above 2
            "6": [POOL_OF_6] * 3,
        }[self.layout]
        return [payload_of(plan_of(mbs, pool), seed=i) for i, mbs in enumerate(layouts)]


def table() -> list[Case]:
    """All combinations the issue names, and what does not fit into their grid."""
    kinds = itertools.product(("gqa", "mla"), (False, True))
    axes = itertools.product(((1, 1), (2, 1), (2, 2)), (1, 2), ("none", "full"))
    grid = [
        Case(attention, experts, *pipeline, tensor, recompute)
        for (attention, experts), (pipeline, tensor, recompute) in itertools.product(
            kinds, list(axes)
        )
    ]
    odd = [
        Case("gqa", experts=False, pipeline=4, chunks=1, tensor=1, recompute="none"),
        Case("gqa", experts=False, pipeline=1, chunks=1, tensor=4, recompute="none", layout="4*"),
        Case("gqa", experts=False, pipeline=2, chunks=1, tensor=1, recompute="none", layout="3"),
        Case("mla", experts=True, pipeline=1, chunks=1, tensor=1, recompute="none", layout="6"),
        Case("gqa", experts=True, pipeline=2, chunks=1, tensor=1, recompute="none", layout="6"),
        Case("gqa", experts=True, pipeline=2, chunks=2, tensor=2, recompute="selective"),
        Case("mla", experts=False, pipeline=2, chunks=1, tensor=1, recompute="selective"),
        Case(
            "gqa", experts=True, pipeline=1, chunks=1, tensor=1, recompute="none", dtype="float32"
        ),
        Case(
            "mla",
            experts=True,
            pipeline=2,
            chunks=2,
            tensor=1,
            recompute="none",
            distributed_optimizer=True,
            dtype="float32",
        ),
        Case(
            "gqa",
            experts=False,
            pipeline=1,
            chunks=1,
            tensor=2,
            recompute="none",
            distributed_optimizer=True,
            dtype="float32",
        ),
    ]
    return grid + odd


IN_SUITE = {
    "gqa-moe-pp1v1-tp1-none-pool4",
    "mla-dense-pp2v1-tp1-none-pool4",
    "gqa-dense-pp1v1-tp2-full-pool4",
    "mla-moe-pp2v2-tp1-full-pool4",
    "mla-moe-pp1v1-tp1-none-pool6",
}


@cache
def truth(model: ModelSpec, dtype: str, layout: str) -> Outcome:
    case = Case(
        "gqa", experts=False, pipeline=1, chunks=1, tensor=1, recompute="none", layout=layout
    )
    return reference(model, replace(TRAINING, dtype=dtype), case.payloads())


def cases() -> list[object]:
    return [
        pytest.param(case, id=str(case), marks=[] if str(case) in IN_SUITE else [pytest.mark.slow])
        for case in table()
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", cases())
def test_loss_gradients_and_weights_equal_one_process(case: Case):
    expected = truth(case.model, case.dtype, case.layout)

    outcomes = run_pool(
        case.num_ranks * case.tensor * case.pipeline,
        trained,
        case.model,
        case.training,
        case.payloads(),
        timeout_s=240,
    )

    tolerance = TOLERANCE[case.dtype]
    if not case.distributed_optimizer:  # which reduces each gradient to one rank's part of it
        found = gradients_of(outcomes, case.tensor)
        assert relative_error(found, gradients_of([expected])) <= tolerance
    assert relative_error(weights_of(outcomes, case.tensor), weights_of([expected])) <= tolerance
    for outcome in outcomes:
        assert outcome.token_count == expected.token_count
        assert outcome.loss == pytest.approx(expected.loss, rel=tolerance)
