"""In the real model: when each all-to-all is launched and waited for; and it changes no bit."""

from dataclasses import replace

import pytest

from tests.workers.layouts import Group, plan_of
from tests.workers.pool import GQA, command_of, joined, payload_of, pool_shape, run_pool
from workers.protocol import ModelSpec, TrainingSpec

TRAINING = TrainingSpec(seed=3, trace=True)
MODELS = {
    "gqa": replace(GQA, num_layers=1),
    "gated gqa": replace(GQA, num_layers=1, output_gate=True),
    "gated mla": replace(
        GQA,
        num_layers=1,
        attention="mla",
        output_gate=True,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_head_dim=16,
        qk_rope_dim=8,
        v_head_dim=16,
    ),
}

MIRROR = {"launch": "wait", "wait": "launch"}


def train(
    rank: int, world_size: int, port: int, model: ModelSpec, training: TrainingSpec
) -> tuple[object, list[str]]:
    """One step of one microbatch at Ulysses degree 2; the weights after it, and what happened."""
    runtime = joined(rank, world_size, port, model, training)
    payload = payload_of(plan_of([[Group(0, 2, 2, [40, 13])]], pool_shape(2, 128, training)))
    result = runtime.run_step(command_of(payload.plan), payload)
    names = [event["name"] for event in result.trace_events]
    mine = [name for name in names if any(word in name for word in ("launch", "wait", "gate"))]
    return runtime.fingerprint()["weights"], mine


@pytest.mark.parametrize("name", MODELS)
def test_launches_wait_behind_the_gate_and_backward_mirrors(name: str):
    overlapped = run_pool(2, train, MODELS[name], TRAINING)
    blocking = run_pool(2, train, MODELS[name], replace(TRAINING, overlap_all_to_all=False))

    assert len({weights for weights, _ in overlapped + blocking}) == 1
    gate = ["gate"] if "gated" in name else []
    forward = ["launch query", "launch value", "launch key", *gate]
    forward += ["wait query", "wait value", "wait key", "launch output", "wait output"]
    for _, events in overlapped:
        assert [e for e in events if e.startswith("forward")] == [f"forward {e}" for e in forward]
        assert [e for e in events if e.startswith("backward")] == [
            f"backward {mirrored(e)}" for e in reversed(forward)
        ]


def mirrored(event: str) -> str:
    """A launch's backward waits, and a wait's launches."""
    verb, _, what = event.partition(" ")
    return f"{MIRROR[verb]} {what}" if verb in MIRROR else event
