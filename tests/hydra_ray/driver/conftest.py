"""A tiny corpus and a loop around a fake crew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hydra_ray.data.batches import GlobalBatches
from hydra_ray.data.corpus import CorpusInfo
from hydra_ray.data.index import SequenceIndex
from hydra_ray.data.writer import CorpusWriter
from hydra_ray.driver.checkpoints import Checkpoints
from hydra_ray.driver.decisions import Limits
from hydra_ray.driver.generation import Rendezvous
from hydra_ray.driver.journal import Journal, Line
from hydra_ray.driver.loop import TrainingLoop
from hydra_ray.driver.placement import UnitShape
from hydra_ray.driver.preparation import Preparation
from hydra_ray.driver.requests import Requests
from hydra_ray.driver.settings import Settings
from hydra_ray.rundir import RunDirectory
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.registry import get_planner
from tests.hydra_ray.driver.fake_crew import FakeCrew


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 sequences of 1 to 40 tokens."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.parquet"
    info = CorpusInfo(tokenizer="bytes", tokenizer_digest="", vocab_size=257, context=64)
    lengths = np.random.default_rng(7).integers(1, 41, size=40)
    with CorpusWriter(path, info) as writer:
        for i, length in enumerate(lengths):
            writer.add(1000 + i, np.full(length, i, np.int32))
    return path


class Bench:
    """One run directory and everything a loop needs; `loop` may be made again to resume."""

    def __init__(self, root: Path, corpus: Path) -> None:
        self.directory = RunDirectory(root / "run")
        self.directory.create("config")
        self.index = SequenceIndex(str(corpus))
        self.checkpoints = Checkpoints(self.directory.checkpoints)
        self.requests = Requests(4)
        self.journal = Journal(self.directory)

    def loop(self, crew: FakeCrew, *, num_steps: int = 12, **changes: Any) -> TrainingLoop:
        limits: dict[str, Any] = {
            "min_units": 1,
            "max_units": 8,
            "max_failures": 8,
            "start_s": 5.0,
            "wait_s": 0.3,
        }
        limits |= {k: changes.pop(k) for k in list(changes) if k in limits}
        settings = Settings(
            num_steps=num_steps,
            limits=Limits(**limits),
            shape=UnitShape(),
            pool_of=lambda n: PoolShape(num_ranks=n, token_budget=64),
            cost=DENSE,
            seed=3,
            corpus="fingerprint",
            config={},
            **changes,
        )
        batches = GlobalBatches(self.index, seed=3, batch_tokens=120)
        return TrainingLoop(
            settings,
            crew=crew,
            preparation=Preparation(batches, get_planner("hydra"), DENSE, lambda p: p),
            checkpoints=self.checkpoints,
            directory=self.directory,
            journal=self.journal,
            requests=self.requests,
            rendezvous=Rendezvous(host="nowhere", port=1),
        )

    def after_each_step(self, act: Callable[[int], None]) -> None:
        """Have the loops made from now on call `act` with the number of each step, once told."""

        def listen(line: Line) -> None:
            if line.kind == "step":
                act(line.record["step"])

        self.journal = Journal(self.directory, listen)

    def ids(self) -> list[list[int]]:
        return [step["sequence_ids"] for step in self.directory.steps()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.directory.events() if event["event"] == name]


@pytest.fixture
def make_bench(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[], Bench]:
    return lambda: Bench(tmp_path_factory.mktemp("bench"), corpus)


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[list[int]]:
    """The sequence ids of 12 steps to which nothing happens."""
    bench = Bench(tmp_path_factory.mktemp("undisturbed"), corpus)
    bench.loop(FakeCrew()).run()
    return bench.ids()
