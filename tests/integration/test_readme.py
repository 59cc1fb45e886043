"""Every command of the README runs, in its order, as it stands there.

Only sizes are turned down (appended settings), and the cluster and the shared folder get the
addresses they have here.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SMALL = [
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_layers=1",
    "cpus_per_worker=0.25",
]
STEPS = {"steps=100": "steps=2", "steps=200": "steps=3"}
# As on a cluster without authentication; both sides must agree on it.
PLAIN_RAY = {
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}


def shell_commands(page: Path) -> list[str]:
    blocks = [part.split("```")[0] for part in page.read_text().split("```sh\n")[1:]]
    return [line for block in blocks for line in block.splitlines() if line.strip()]


COMMANDS = shell_commands(ROOT / "README.md")
MAKE = [command for command in COMMANDS if command.startswith("make ")]
HERE = [c for c in COMMANDS if c.startswith("hydra-ray ") and "/mnt/" not in c]
CLUSTER = [c for c in COMMANDS if c.startswith("hydra-ray ") and "/mnt/" in c]


def test_the_readme_has_no_command_that_is_not_run_here() -> None:
    assert sorted(COMMANDS) == sorted([*MAKE, *HERE, *CLUSTER])
    assert len(HERE) >= 7
    assert len(CLUSTER) >= 4


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_lead_to_what_the_readme_says(command: str) -> None:
    plan = subprocess.run(
        [*command.split(), "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    expected = {
        "make quickstart": ["hydra-ray train jobs/quickstart.yaml"],
        "make test": ["ruff check", "mypy", "lint-imports", "pytest"],
    }[command]
    for text in expected:
        assert text in plan


class Shell:
    """Runs commands in a folder that looks like a checkout with the user's texts beside it."""

    def __init__(self, folder: Path, ray_folder: str) -> None:
        self.folder = folder
        self.environment = os.environ | PLAIN_RAY | {"RAY_TMPDIR": ray_folder}

    def run(self, command: str, replace: dict[str, str] | None = None) -> str:
        words = [STEPS.get(word, word) for word in shlex.split(command)]
        for old, new in (replace or {}).items():
            words = [word.replace(old, new) for word in words]
        if words[1] in ("train", "submit"):
            words += SMALL
        if words[1] == "submit":
            words.append("steps=100000")  # until it is stopped
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, ray_folder: str) -> Shell:
    folder = tmp_path_factory.mktemp("user")
    (folder / "jobs").symlink_to(ROOT / "jobs")
    texts = folder / "my_texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"document {i} says a little more. " * (1 + 5 * i))
    return Shell(folder, ray_folder)


@pytest.mark.timeout(600)
def test_commands_on_this_machine(shell: Shell) -> None:
    for command in HERE:
        assert shell.run(command).strip(), command
    assert (shell.folder / "corpus.parquet").is_file()
    steps = (shell.folder / "runs" / "mine" / "steps.jsonl").read_text().splitlines()
    assert len(steps) == 3  # two, and one more after --resume


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def head(ray_folder: str, tmp_path: Path) -> Iterator[str]:
    """The dashboard of a cluster started for this test; ended with the processes it began."""
    port = free_port()
    options = {
        "--port": free_port(),
        "--ray-client-server-port": free_port(),
        "--dashboard-port": port,
        "--dashboard-agent-listen-port": free_port(),
        "--num-cpus": 4,
        "--object-store-memory": 200 << 20,
        "--temp-dir": f"{ray_folder}/head",
    }
    log = tmp_path / "head.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(BIN / "ray"), "start", "--head", "--block"]
            + [f"{name}={value}" for name, value in options.items()],
            stdout=out,
            stderr=out,
            env=os.environ | PLAIN_RAY,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    wait_for_agent(url, process, log)
    yield url
    process.terminate()
    process.wait(timeout=60)


def wait_for_agent(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Jobs are taken by an agent that comes up some seconds after the head."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/nodes?view=summary", timeout=10) as response:  # noqa: S310 - http
                nodes = json.load(response)["data"]["summary"]
        except OSError:
            nodes = []
        if nodes and all(node.get("agent") for node in nodes):
            return
        time.sleep(0.5)
    pytest.fail(log.read_text())


@pytest.mark.timeout(600)
def test_commands_on_a_cluster(shell: Shell, head: str, tmp_path: Path) -> None:
    if not (shell.folder / "corpus.parquet").exists():
        shell.run(next(c for c in HERE if "prepare" in c))
    (tmp_path / "corpus.parquet").write_bytes((shell.folder / "corpus.parquet").read_bytes())
    replace = {"/mnt": str(tmp_path), "http://head:8265": head}
    submit, *others = CLUSTER
    shell.run(submit, replace)
    wait_for_steps(tmp_path / "runs" / "big" / "steps.jsonl")
    outputs = [shell.run(command, replace) for command in others]
    assert "grow" in outputs[-2]
    assert "stopped" in outputs[-1]


def wait_for_steps(steps: Path) -> None:
    """A job takes a while to start; nobody scales it before it trains."""
    deadline = time.monotonic() + 200
    while not (steps.exists() and steps.read_text()):
        assert time.monotonic() < deadline, "the job did not train"
        time.sleep(0.5)
