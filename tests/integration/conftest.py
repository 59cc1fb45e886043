"""One embedded Ray for all integration tests, a small corpus, and runs on them."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from hydra_ray.config import Recipe
from hydra_ray.data.corpus import CorpusInfo
from hydra_ray.data.writer import CorpusWriter
from hydra_ray.driver.actor import NAMESPACE
from hydra_ray.driver.journal import Line
from hydra_ray.launch import LiveRun, follow, start
from hydra_ray.rundir import RunDirectory, run_directory

CONTEXT = 512
SERVERS = frozenset({"cluster", "object_store"})
ENDLESS = 100_000
NUM_CPUS = 8  # logical: more workers than cores, each of one thread


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with servers come last of all: the others fork, which a threaded process may not."""
    items.sort(key=lambda item: not SERVERS.isdisjoint(getattr(item, "fixturenames", ())))


def write_corpus(path: Path, lengths: list[int]) -> Path:
    """Sequences that count upwards from a start of their own: something a model can learn."""
    info = CorpusInfo(tokenizer="bytes", tokenizer_digest="", vocab_size=257, context=CONTEXT)
    with CorpusWriter(path, info) as writer:
        for i, length in enumerate(lengths):
            tokens = (np.arange(length) * (1 + i % 3) + 17 * i) % 97
            writer.add(5000 + i, tokens.astype(np.int32))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 sequences of skewed lengths; the longest takes four ranks of 128 tokens."""
    lengths = np.random.default_rng(11).pareto(1.2, size=119) * 20 + 2
    path = tmp_path_factory.mktemp("corpus") / "corpus.parquet"
    return write_corpus(path, [1, *np.minimum(lengths, CONTEXT).astype(int).tolist()])


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[str]:
    """A short folder for Ray's sockets, whose paths have a length limit."""
    with TemporaryDirectory(prefix="hy") as folder:
        yield folder


@pytest.fixture(scope="session")
def object_store_port() -> Iterator[int]:
    """Where an object store will be: workers learn it from the environment Ray starts with."""
    with closing(socket.create_server(("127.0.0.1", 0))) as reserved:
        port = int(reserved.getsockname()[1])
    values = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield port


@pytest.fixture(scope="session")
def object_store(object_store_port: int) -> Iterator[str]:
    """An S3 server on a port of this machine; yields the URL of an empty bucket."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=object_store_port)
    server.start()
    s3fs.S3FileSystem(use_listings_cache=False).mkdir("bucket")
    yield "s3://bucket"
    server.stop()


@pytest.fixture(scope="session")
def cluster(ray_folder: str, object_store_port: int) -> Iterator[None]:
    """A Ray of the tests' own; no other cluster is joined or ended."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=NUM_CPUS,
        object_store_memory=200 << 20,
        _temp_dir=ray_folder,
    )
    yield
    ray.shutdown()


def settings(corpus: Path, storage: Path) -> dict[str, Any]:
    """A recipe of a tiny model, as a user would write it."""
    return {
        "storage_path": str(storage),
        "seed": 5,
        "steps": 20,
        "context": CONTEXT,
        "token_budget": 256,
        "global_batch_tokens": 1024,
        "workers": 2,
        "data": {"corpus": str(corpus)},
        "model": {
            "num_layers": 1,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "optimizer": {"lr": 3e-3, "warmup_steps": 3},
        "elastic": {"grow_timeout_s": 300.0},  # the machine may be busy
    }


@pytest.fixture(scope="session")
def recipe_of(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """Makes a recipe with changes on top; all share one storage path."""
    storage = tmp_path_factory.mktemp("runs")
    return lambda **changes: Recipe.model_validate(settings(corpus, storage) | changes)


class Run:
    """One run on the cluster of the tests."""

    def __init__(self, live: LiveRun, directory: RunDirectory) -> None:
        self.live, self.directory = live, directory

    @property
    def driver(self) -> Any:
        return self.live.driver

    def finish(self, show: Callable[[Line], None] = lambda _: None) -> dict[str, Any]:
        return follow(self.live, show)

    def end_after_this_step(self) -> None:
        ray.get(self.driver.stop.remote(), timeout=60)
        self.finish()

    def steps(self) -> list[dict[str, Any]]:
        return self.directory.steps()

    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps()]

    def ids(self) -> list[list[int]]:
        return [step["sequence_ids"] for step in self.steps()]

    def status(self) -> dict[str, Any]:
        return dict(ray.get(self.driver.status.remote(), timeout=60))

    def causes(self) -> list[str]:
        """Why each generation was formed."""
        return [event["cause"] for event in self.events("generation")]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.directory.events() if event["event"] == name]


def footprint(pid: int) -> dict[str, int]:
    """Threads, open files and memory of a process; a group of gloo's has some of each."""
    process = psutil.Process(pid)
    own_mib = process.memory_full_info().uss >> 20  # without pages shared with the object store
    return {"threads": process.num_threads(), "files": process.num_fds(), "MiB": own_mib}


@contextmanager
def running(recipe: Recipe, name: str, **options: Any) -> Iterator[Run]:
    """Start a run, and leave no driver behind."""
    directory = run_directory(recipe.storage_path, name)
    live = start(recipe, name, directory, local=True, **options)
    try:
        yield Run(live, directory)
    finally:
        ray.kill(live.driver, no_restart=True)


@pytest.fixture(scope="session")
def uninterrupted(cluster: None, recipe_of: Callable[..., Recipe]) -> Run:
    """40 steps on 2 workers to which nothing happens."""
    with running(recipe_of(steps=40), "uninterrupted") as run:
        run.finish()
    return run
