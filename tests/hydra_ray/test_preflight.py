"""A run that cannot work is refused before anything is written or started."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import yaml
from tokenizers.models import BPE

from hydra_ray.cli.app import run
from hydra_ray.cli.submit import RECIPE_VARIABLE
from hydra_ray.config import Recipe, load_recipe
from hydra_ray.data.corpus import CorpusInfo, corpus_schema
from hydra_ray.data.writer import CorpusWriter
from hydra_ray.preflight import check_machine, check_size, open_corpus, smallest_pool
from jobs import train_job
from planner.errors import InfeasibleError, InputError

INFO = CorpusInfo(tokenizer="bytes", tokenizer_digest="", vocab_size=257, context=64)


def write_corpus(path: Path, lengths: list[int]) -> None:
    with CorpusWriter(path, INFO) as writer:
        for i, length in enumerate(lengths):
            writer.add(100 + i, np.zeros(length, np.int32))


@pytest.fixture
def recipe_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe beside a corpus whose longest sequence has 60 tokens; 2 workers of 32 each."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.parquet", [5, 60, 7])
    settings = {
        "name": "run",
        "steps": 2,
        "context": 64,
        "token_budget": 32,
        "global_batch_tokens": 128,
        "workers": 2,
        "cpus_per_worker": 0.01,
        "data": {"corpus": "corpus.parquet"},
        "model": {
            "num_layers": 1,
            "hidden_size": 16,
            "ffn_hidden_size": 16,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def nothing(_: Path) -> None:
    pass


def truncate(folder: Path) -> None:
    path = folder / "corpus.parquet"
    path.write_bytes(path.read_bytes()[:-40])


def drop_column(folder: Path) -> None:
    path = folder / "corpus.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["tokens"]), path)


def make_empty(folder: Path) -> None:
    pq.write_table(corpus_schema(INFO).empty_table(), folder / "corpus.parquet")


def make_foreign(folder: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), folder / "corpus.parquet")


def make_tokenizer(folder: Path) -> None:
    tokenizers.Tokenizer(BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))


def make_run(folder: Path) -> None:
    (folder / "runs" / "run").mkdir(parents=True)
    (folder / "runs" / "run" / "config.yaml").write_text("name: run\n")


def make_checkpoint_elsewhere(folder: Path) -> None:
    (folder / "bucket" / "run" / "step_000004").mkdir(parents=True)
    (folder / "bucket" / "run" / "step_000004" / "manifest.json").write_text("{}")


BAD_INPUT: dict[str, tuple[list[str], Callable[[Path], None], tuple[str, ...]]] = {
    "unknown key": (["token_buget=3"], nothing, ("unknown config key", "token_budget?")),
    "unknown planner": (["planner=hydar"], nothing, ("planner", "hydar", "Did you mean hydra")),
    "budget of 0": (["token_budget=0"], nothing, ("token_budget", "0", ">= 1")),
    "no corpus": (["data.corpus=absent.parquet"], nothing, ("no such file", "absent.parquet")),
    "no source": (
        ["data.corpus=null", "data.sources=[absent]"],
        nothing,
        ("no such source", "absent"),
    ),
    "missing column": ([], drop_column, ("tokens", "corpus.parquet", "hydra-ray prepare")),
    "no corpus file": ([], make_foreign, ("id, length, tokens", "columns text")),
    "empty corpus": ([], make_empty, ("the corpus is empty", "hydra-ray prepare")),
    "truncated": ([], truncate, ("not a whole Parquet file", "corpus.parquet")),
    "longer than G x B": (["token_budget=28"], nothing, ("60 tokens", "workers 2", "56 tokens")),
    "longer than min x B": (["elastic.min=1"], nothing, ("60 tokens", "elastic.min 1", "32")),
    "longer than the context": (["context=59"], nothing, ("60 tokens", "context 59")),
    "too many workers": (["cpus_per_worker=1e4"], nothing, ("CPU cores", "cpus_per_worker")),
    "no GPU": (["gpus_per_worker=1e4"], nothing, ("GPUs", "gpus_per_worker")),
    "longer than cp_comm can cut": (["cp_comm=[1, 1]"], nothing, ("60 tokens", "degree 1 ")),
    "another tokenizer": (
        ["data.tokenizer=tokenizer.json"],
        make_tokenizer,
        ("another tokenizer", "tokenizer.json", "bytes"),
    ),
    "existing name": ([], make_run, ("run", "--resume")),
    "checkpoints of that name": (
        ["checkpoint.path=bucket"],
        make_checkpoint_elsewhere,
        ("bucket/run/step_000004", "--resume", "--run-name"),
    ),
    "nothing to resume": (["--resume"], nothing, ("resume",)),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_train_refuses_bad_input_and_writes_nothing(
    recipe_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, damage, words = BAD_INPUT[case]
    damage(recipe_path.parent)
    before = sorted(recipe_path.parent.rglob("*"))
    assert run(["train", str(recipe_path), *arguments, "--json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.err.splitlines()[-1])["error"]
    said = " ".join(str(error[key]) for key in ("what", "value", "limit", "remedy"))
    assert all(word in said for word in words), said
    assert not captured.out
    assert sorted(recipe_path.parent.rglob("*")) == before


def recipe_with(recipe_path: Path, *overrides: str) -> Recipe:
    return load_recipe(recipe_path, overrides)


def test_workers_and_standbys_must_fit_the_machine(recipe_path: Path) -> None:
    recipe = recipe_with(
        recipe_path, "workers=4", "cpus_per_worker=0.5", "elastic.standbys=1", "elastic.max=8"
    )
    check_machine(recipe, num_cpus=2.5, num_gpus=0)
    with pytest.raises(InputError) as error:
        check_machine(recipe, num_cpus=2, num_gpus=0)
    assert error.value.value == "5 workers x 0.5 CPU cores = 2.5"
    assert error.value.limit == "2 CPU cores, which is 4 workers"


def test_a_job_of_more_workers_than_the_cluster_holds_is_refused_before_it_starts(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def start(recipe: Recipe, run: str, directory: object, *, local: bool) -> None:
        started.append(run)
        raise InputError("started")

    cluster = SimpleNamespace(
        init=lambda **_: None, shutdown=lambda: None, cluster_resources=lambda: {"CPU": 1.0}
    )
    monkeypatch.setattr(train_job, "ray", cluster)
    monkeypatch.setattr(train_job, "start", start)
    monkeypatch.setattr(train_job.signal, "signal", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["train_job", "big"])

    def job(*overrides: str) -> str:
        recipe = recipe_with(recipe_path, "cpus_per_worker=1", *overrides)
        monkeypatch.setenv(RECIPE_VARIABLE, recipe.model_dump_json())
        assert train_job.main() == 2
        return capsys.readouterr().err

    said = job()
    assert "2 workers x 1 CPU cores = 2" in said
    assert "1 CPU cores, which is 1 workers on this cluster" in said
    assert "elastic.follow_cluster" in said
    assert not started
    assert "GPUs" in job("cpus_per_worker=0.5", "gpus_per_worker=1")
    assert not (recipe_path.parent / "runs").exists()
    job("elastic.follow_cluster=true")
    job("cpus_per_worker=0.5")
    assert started == ["big", "big"]


def test_absent_corpus_is_prepared_once_from_its_sources(recipe_path: Path) -> None:
    (recipe_path.parent / "texts").mkdir()
    (recipe_path.parent / "texts" / "a.txt").write_text("hello")
    recipe = recipe_with(recipe_path, "data.corpus=null", "data.sources=[texts]")
    with open_corpus(recipe) as index:
        assert index.lengths.tolist() == [6]
        assert index.info.context == 64
    written = Path(recipe.corpus_path).stat().st_mtime_ns
    open_corpus(recipe).close()
    assert Path(recipe.corpus_path).stat().st_mtime_ns == written


def test_smallest_pool_holds_the_longest_sequence(recipe_path: Path) -> None:
    recipe = recipe_with(recipe_path)
    assert smallest_pool(recipe, 60) == 2
    assert smallest_pool(recipe, 20) == 1
    assert smallest_pool(recipe, 65) == 3
    assert smallest_pool(recipe_with(recipe_path, "elastic.min=2"), 20) == 2
    in_units = recipe_with(recipe_path, "parallel.tensor=2", "workers=4")
    assert smallest_pool(in_units, 60) == 4
    with pytest.raises(InfeasibleError, match="max_degree 1,"):
        smallest_pool(recipe_with(recipe_path, "max_degree=1"), 60)


@pytest.mark.parametrize(
    ("overrides", "num_workers", "limit"),
    [
        ((), 2, ">= 3 workers for the longest sequence of 90 tokens"),
        (("elastic.min=2",), 1, ">= 2 workers for elastic.min"),
        (("elastic.max=4",), 5, "elastic.max 4"),
        (("parallel.tensor=2",), 4, ">= 6 workers for the longest sequence of 90 tokens"),
    ],
)
def test_a_live_run_is_not_scaled_out_of_its_bounds(
    recipe_path: Path, overrides: tuple[str, ...], num_workers: int, limit: str
) -> None:
    recipe = recipe_with(recipe_path, *overrides)
    with pytest.raises(InputError) as error:
        check_size(recipe, num_workers, longest=90)
    assert str(error.value.limit).startswith(limit)
    check_size(recipe_with(recipe_path), 3, longest=90)
