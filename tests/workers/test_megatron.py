"""What is ours around Megatron: the rate, the weights a run starts from, the microbatch."""

import math

import pytest
import torch

from workers.errors import WorkerError
from workers.megatron import context, patches
from workers.megatron.initialise import tensor_part
from workers.megatron.optimizer import learning_rate
from workers.protocol import TrainingSpec


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 0.25), (4, 1.0), (9, 0.55), (14, 0.1), (100, 0.1)]
)
def test_the_rate_warms_up_and_decays(step: int, expected: float):
    training = TrainingSpec(seed=0, lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=14)

    assert math.isclose(learning_rate(step, training), expected)


def test_without_decay_the_rate_stays():
    assert learning_rate(1000, TrainingSpec(seed=0, lr=0.5)) == 0.5


def test_tensor_ranks_hold_a_gated_layers_halves_each_in_part():
    gate, up = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)

    parts = [
        tensor_part(torch.cat([gate, up]), "layers.0.mlp.linear_fc1.weight", 0, rank, 2)
        for rank in range(2)
    ]

    assert torch.equal(torch.cat([part[:2] for part in parts]), gate)
    assert torch.equal(torch.cat([part[2:] for part in parts]), up)


def test_what_is_captured_runs_again_in_its_own_microbatch():
    first, second = object(), object()
    with context.entered(first):
        again = context.captured(context.current)

    with context.entered(second):
        assert again() is first
        assert context.current() is second
    with pytest.raises(RuntimeError, match="outside"):
        context.current()


def test_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patches, "_applied", False)
    monkeypatch.setattr(patches, "version", lambda _: "0.17.0")

    with pytest.raises(WorkerError, match=r"0\.17\.0"):
        patches.apply()
