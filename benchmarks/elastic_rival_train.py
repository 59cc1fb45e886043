"""A tiny transformer under Ray Train's elastic TorchTrainer, as its users write one.

Shapes: B sequences of a rank, T tokens of one, D hidden size, V vocabulary.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.elastic_run import ENDLESS, TINY

STEPS_PER_REPORT = 10  # its users report and checkpoint every so many steps
LOOK_EVERY_S = 1.0
BATCH_TOKENS, SEQUENCE_TOKENS, VOCAB = 2048, 128, 257


class RayTrainRun:
    """A run of the trainer and the steps it wrote down."""

    def __init__(self, folder: Path) -> None:
        self._steps, self._members = folder / "steps.jsonl", folder / "members.jsonl"

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator["RayTrainRun"]:
        """Start a run on the connected cluster, and end it with the block."""
        folder.mkdir()
        training = _FIT.remote(str(folder))
        try:
            yield cls(folder)
        finally:
            ray.cancel(training, force=True, recursive=True)

    def completed(self) -> list[dict[str, Any]]:
        """All completed steps in order; one that was done again is there again."""
        return _records(self._steps)

    def pid_on(self, node_id: str) -> int:
        """The process of the latest worker on a node."""
        return next(
            int(m["pid"]) for m in reversed(_records(self._members)) if m["node"] == node_id
        )


class TinyModel(nn.Module):
    """As many layers and parameters as our run's model."""

    def __init__(self) -> None:
        super().__init__()
        hidden = TINY["hidden_size"]
        layer = nn.TransformerEncoderLayer(
            hidden, TINY["num_heads"], TINY["ffn_hidden_size"], dropout=0.0, batch_first=True
        )
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.layers = nn.TransformerEncoder(layer, TINY["num_layers"], enable_nested_tensor=False)
        self.head = nn.Linear(hidden, VOCAB)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        mask_TT = nn.Transformer.generate_square_subsequent_mask(tokens_BT.shape[1])
        hidden_BTD = self.layers(self.embedding(tokens_BT), mask=mask_TT, is_causal=True)
        logits_BTV: torch.Tensor = self.head(hidden_BTD)
        return logits_BTV


def _fit(folder: str) -> None:
    """Train until ended, from a process of its own."""
    TorchTrainer(
        _train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(
            num_workers=(3, 4),
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=LOOK_EVERY_S,
        ),
        run_config=RunConfig(
            name="rival", storage_path=folder, failure_config=FailureConfig(max_failures=100)
        ),
    ).fit()


_FIT: Any = ray.remote(num_cpus=0, max_retries=0)(_fit)


def _train(config: dict[str, str]) -> None:
    """The train loop of one worker."""
    torch.set_num_threads(1)
    folder, context = Path(config["folder"]), train.get_context()
    node = ray.get_runtime_context().get_node_id()
    _write(folder / "members.jsonl", {"pid": os.getpid(), "node": node})
    model = train.torch.prepare_model(TinyModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first = _restore(model, optimizer) + 1
    num_sequences = BATCH_TOKENS // SEQUENCE_TOKENS // context.get_world_size()
    for step in range(first, ENDLESS):
        tokens_BT = torch.randint(VOCAB, (num_sequences, SEQUENCE_TOKENS))
        logits_BTV = model(tokens_BT[:, :-1])
        loss = cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if context.get_world_rank() == 0:
            done = {"step": step, "time": time.time(), "num_ranks": context.get_world_size()}
            _write(folder / "steps.jsonl", done)
        if step % STEPS_PER_REPORT == 0:
            _report(step, model, optimizer, loss.item())


def _report(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loss: float) -> None:
    """Report the loss, and rank 0's state with it."""
    if train.get_context().get_world_rank() != 0:
        train.report({"loss": loss})
        return
    with TemporaryDirectory() as folder:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(folder) / "state.pt")
        train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(folder))


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take the latest checkpoint's state, if there is one; its step, or 0."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _write(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as lines:
        lines.write(json.dumps(record) + "\n")


def _records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may grow."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]
