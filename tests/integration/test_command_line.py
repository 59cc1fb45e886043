"""The command line as a user meets it: bad input, status, stop, resume, Ctrl-C, no leftovers."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hydra_ray.cli.app import run as run_command
from hydra_ray.rundir import RunDirectory
from tests.integration.conftest import settings

MARK = "HYDRA_RAY_TEST_MARK"
# Tests may run in the background, where shells have SIGINT ignored, and children inherit that.
AT_A_TERMINAL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from hydra_ray.cli.app import main
main()
"""
LEAVE_S = 20  # Ray's agents end by themselves seconds after the process that started them


def empty_corpus(tmp_path: Path, corpus: Path) -> Path:
    table = pq.read_table(corpus)
    path = tmp_path / "empty.parquet"
    pq.write_table(table.slice(0, 0), path)
    return path


def corpus_without_lengths(tmp_path: Path, corpus: Path) -> Path:
    path = tmp_path / "columns.parquet"
    pq.write_table(pa.table({"id": [1], "text": ["a"]}), path)
    return path


def truncated_corpus(tmp_path: Path, corpus: Path) -> Path:
    path = tmp_path / "truncated.parquet"
    path.write_bytes(corpus.read_bytes()[:-100])
    return path


BAD_INPUT: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["tokn_budget=5"], ["tokn_budget", "Did you mean token_budget?"]),
    "budget of 0": (["token_budget=0"], ["token_budget", "0"]),
    "unknown planner": (["planner=hidra"], ["hidra", "Did you mean hydra?"]),
    "no such corpus": (["data.corpus=/nowhere.parquet"], ["/nowhere.parquet", "hydra-ray prepare"]),
    "too many workers": (["workers=4000"], ["4000", "cpus_per_worker"]),
    "sequence beyond the pool": (["token_budget=64"], ["512 tokens", "token_budget"]),
    "sequence beyond the context": (["context=100"], ["512 tokens", "context 100"]),
    "resume of nothing": (["--resume"], ["no such run to resume", "--run-name"]),
}
BAD_CORPUS: dict[str, tuple[Callable[[Path, Path], Path], list[str]]] = {
    "empty": (empty_corpus, ["empty"]),
    "columns": (corpus_without_lengths, ["length", "tokens"]),
    "truncated": (truncated_corpus, ["not a whole Parquet file"]),
}


@pytest.fixture
def recipe(tmp_path: Path, corpus: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    values = settings(corpus, tmp_path / "runs") | {"workers": 2, "cpus_per_worker": 0.25}
    path.write_text(yaml.safe_dump(values))
    return path


def assert_refused(arguments: list[str], told: list[str], tmp_path: Path, capsys: Any) -> None:
    """Exit code 2, everything told on stderr, and nothing written."""
    assert run_command(arguments) == 2
    error = capsys.readouterr().err
    for text in told:
        assert text in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_found_before_anything_is_written(name, recipe, tmp_path, capsys):
    changes, told = BAD_INPUT[name]
    assert_refused(["train", str(recipe), *changes], told, tmp_path, capsys)


@pytest.mark.parametrize("name", BAD_CORPUS)
def test_a_bad_corpus_is_found_before_anything_is_written(name, recipe, corpus, tmp_path, capsys):
    make, told = BAD_CORPUS[name]
    path = make(tmp_path, corpus)
    assert_refused(["train", str(recipe), f"data.corpus={path}"], told, tmp_path, capsys)


def test_an_existing_name_needs_resume(recipe, tmp_path, capsys):
    directory = RunDirectory(tmp_path / "runs" / "run")
    directory.create("steps: 1\n")
    assert run_command(["train", str(recipe)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert [path.name for path in directory.root.iterdir()] == ["config.yaml"]


def test_submit_wants_a_cluster_and_paths_that_hold_there(recipe, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    assert run_command(["submit", str(recipe), "storage_path=runs"]) == 2
    assert "absolute path" in capsys.readouterr().err
    assert run_command(["submit", str(recipe)]) == 2
    assert "no Ray cluster is named" in capsys.readouterr().err


class Session:
    """A shell with the command: its processes are known by a mark they all inherit."""

    def __init__(self, ray_folder: str) -> None:
        self.mark = uuid.uuid4().hex
        self._environment = os.environ | {MARK: self.mark, "RAY_TMPDIR": ray_folder}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", AT_A_TERMINAL, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        process = self.start(*arguments, "--json")
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, error
        return json.loads(out.splitlines()[-1])

    def processes(self) -> list[psutil.Process]:
        """Every living process that was started here, by whomever."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != "zombie":
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def leftovers(self) -> list[psutil.Process]:
        """What still lives once Ray's processes have had the time to see that their head went."""
        deadline = time.monotonic() + LEAVE_S
        while (alive := self.processes()) and time.monotonic() < deadline:
            psutil.wait_procs(alive, timeout=1.0)
        return alive


@pytest.fixture
def session(ray_folder: str) -> Iterator[Session]:
    session = Session(ray_folder)
    yield session
    for process in session.processes():
        process.kill()


def wait_for_step(process: subprocess.Popen[str]) -> None:
    """Read stderr until a step is reported."""
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        if line.startswith("step "):
            return
        told.append(line)
    pytest.fail(f"the run ended without a step: {''.join(told)}")


@pytest.mark.timeout(300)
def test_a_run_is_watched_stopped_resumed_and_interrupted_without_leftovers(
    recipe, tmp_path, session
):
    train = ("train", str(recipe), "steps=100000", "--run-name", "told", "--no-dashboard", "--json")
    where = ("--storage-path", str(tmp_path / "runs"))

    first = session.start(*train)
    wait_for_step(first)
    status = session.json("status", "told", *where)
    assert status["state"] == "running"
    assert status["num_workers"] == 2
    assert session.json("stop", "told", *where) == {"run": "told", "state": "stopped"}
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 0
    result = json.loads(out)
    assert result.keys() == {
        "run",
        "state",
        "workers",
        "steps",
        "first_loss",
        "last_loss",
        "tokens_per_s",
        "run_dir",
    }
    assert result["state"] == "stopped"
    assert session.leftovers() == []

    second = session.start(*train, "--resume")
    wait_for_step(second)
    os.killpg(second.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 130
    assert json.loads(out)["steps"] > result["steps"]
    assert session.leftovers() == []
    steps = RunDirectory(tmp_path / "runs" / "told").steps()
    assert [step["step"] for step in steps] == list(range(1, json.loads(out)["steps"] + 1))
    assert session.json("status", "told", *where)["state"] == "stopped"
