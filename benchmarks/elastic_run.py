"""A long run on a Ray of its own, for measuring what changes of its workers cost."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray

from hydra_ray.config import Recipe
from hydra_ray.data.corpus import CorpusInfo
from hydra_ray.data.writer import CorpusWriter
from hydra_ray.launch import LiveRun, answer, start
from hydra_ray.rundir import RunDirectory, run_directory
from workers.actor import RuntimeFactory, megatron_runtime

ANSWER_S = 300.0
ENDLESS = 1_000_000
TINY = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_heads": 8,
    "num_kv_heads": 2,
}


class ElasticRun:
    """A live run and its records."""

    def __init__(self, live: LiveRun, directory: RunDirectory) -> None:
        self._live, self.directory = live, directory
        self._seen = 0

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a control method of the driver."""
        return answer(getattr(self._live.driver, method).remote(*arguments))

    def wait_for(self, is_it: Callable[[str, dict[str, Any]], bool]) -> dict[str, Any]:
        """The next step or event that `is_it` says yes to; records before it are passed over."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            lines, _ = self.ask("follow", self._seen, 1.0)
            for line in lines:
                self._seen = line.number
                if is_it(line.kind, dict(line.record)):
                    return dict(line.record)
        raise TimeoutError("the run did not do what the benchmark waits for")

    def steps(self, num_steps: int) -> None:
        """Let some steps pass."""
        for _ in range(num_steps):
            self.wait_for(lambda kind, _: kind == "step")

    def standby_is_ready(self) -> None:
        """Wait until a spare worker is loaded."""
        deadline = time.monotonic() + ANSWER_S
        while not self.ask("status")["num_standbys"]:
            if time.monotonic() > deadline:
                raise TimeoutError("no standby got ready")
            time.sleep(0.1)

    def kill(self, rank: int) -> float:
        """SIGKILL the worker of a rank; returns the wall clock of the deed."""
        pid = self.ask("status")["workers"][rank]["pid"]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at


def write_corpus(path: Path) -> Path:
    """Skewed lengths, random bytes: enough for a run of any length."""
    rng = np.random.default_rng(1)
    info = CorpusInfo(tokenizer="bytes", tokenizer_digest="", vocab_size=257, context=1024)
    with CorpusWriter(path, info) as writer:
        for i, length in enumerate(np.minimum(rng.pareto(1.2, 2000) * 40 + 2, 1024).astype(int)):
            writer.add(i, rng.integers(0, 256, length).astype(np.int32))
    return path


@contextmanager
def elastic_run(
    folder: Path,
    name: str,
    *,
    num_workers: int,
    cpus_per_worker: float = 0.1,
    planner: str = "hydra",
    batch_tokens: int = 2048,
    make_runtime: RuntimeFactory = megatron_runtime,
    **elastic: Any,
) -> Iterator[ElasticRun]:
    """Start a run of a tiny model on the connected cluster, and end it with the block."""
    recipe = Recipe.model_validate(
        {
            "storage_path": str(folder / "runs"),
            "steps": ENDLESS,
            "context": 1024,
            "token_budget": 512,
            "global_batch_tokens": batch_tokens,
            "planner": planner,
            "workers": num_workers,
            "cpus_per_worker": cpus_per_worker,
            "data": {"corpus": str(folder / "corpus.parquet")},
            "model": TINY,
            "elastic": {"max_failures": 1000, "heartbeat_s": 1.0, "grow_timeout_s": ANSWER_S}
            | elastic,
        }
    )
    directory = run_directory(recipe.storage_path, name)
    live = start(recipe, name, directory, local=True, make_runtime=make_runtime)
    try:
        yield ElasticRun(live, directory)
    finally:
        ray.kill(live.driver, no_restart=True)
