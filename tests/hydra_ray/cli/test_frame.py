"""The command line answers fast, in text or JSON, with exit codes that mean something."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hydra_ray.cli import output
from hydra_ray.cli.app import app, run
from planner.errors import HydraError, InputError
from workers.facts import machine_facts

COMMAND = [str(Path(sys.executable).with_name("hydra-ray"))]
HEAVY = ("ray", "torch", "pyarrow", "numba", "pandas", "megatron", "plotly")
# Tests may run in the background, where shells have SIGINT ignored, and children inherit that.
AT_A_TERMINAL = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from hydra_ray.cli.app import main; main()",
]


def spoken(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from hydra_ray.cli.app import run; assert run(['--help']) == 0; "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_has_json_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        command.name or getattr(command.callback, "__name__", "")
        for command in app.registered_commands
    ]
    assert {"prepare", "doctor"} <= set(names)
    for name in names:
        assert run([name, "--help"]) == 0
        text, _ = spoken(capsys)
        assert "--json" in text, name


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["prepare"], 2, "Missing"),
        (["prepare", "x", "--ot", "y"], 2, "No such option"),
        (["unheard-of"], 2, "No such command"),
        (["prepare", "/no/such/folder", "--out", "corpus.parquet"], 2, "no such source"),
    ],
)
def test_mistakes_exit_with_two_and_write_nothing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == code
    out, error = spoken(capsys)
    assert words in error
    assert not out
    assert not list(tmp_path.iterdir())


def test_errors_say_what_value_limit_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    error = InputError("the budget is too small", value=0, limit=">= 1", remedy="Raise it.")
    output.say_error(error, as_json=False)
    assert spoken(capsys)[1].splitlines() == [
        "error: the budget is too small",
        "  got: 0",
        "  limit: >= 1",
        "  Raise it.",
    ]
    output.say_error(error, as_json=True)
    assert json.loads(spoken(capsys)[1])["error"] == {
        "kind": "InputError",
        "what": "the budget is too small",
        "value": 0,
        "limit": ">= 1",
        "remedy": "Raise it.",
        "exit_code": 2,
    }


def test_json_errors_are_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "corpus.parquet")
    assert run(["prepare", "/no/such/folder", "--out", out, "--json"]) == 2
    text, error = spoken(capsys)
    assert not text
    assert json.loads(error)["error"]["value"] == "/no/such/folder"


def test_prepare_counts_in_text_and_in_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for name, text in {"a": "one", "b": "one", "c": "", "d": "x" * 40}.items():
        (tmp_path / "in" / name).write_text(text)
    arguments = ["prepare", str(tmp_path / "in"), "--context", "16", "--processes", "1", "--out"]
    assert run([*arguments, str(tmp_path / "1.parquet"), "--json"]) == 0
    out, error = spoken(capsys)
    counts = json.loads(out)
    assert counts.pop("seconds") >= 0
    assert counts == {
        "corpus": str(tmp_path / "1.parquet"),
        "documents": 4,
        "not_text": 0,
        "empty": 1,
        "duplicates": 1,
        "too_long": 1,
        "sequences": 4,
        "tokens": 45,
        "longest": 16,
        "done_bytes": 46,
        "total_bytes": 46,
    }
    assert "preparing 100%" in error
    assert run([*arguments, str(tmp_path / "2.parquet"), "--on-too-long", "drop"]) == 0
    lines = spoken(capsys)[0].splitlines()
    assert "longer than the context  1 (dropped)" in lines
    assert "duplicates left out      1" in lines


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("text")
    ours, theirs = os.openpty()
    arguments = ["prepare", "in.txt", "--out", "out.parquet", "--processes", "1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        stderr=theirs,
        stdout=subprocess.PIPE,
        env=environment,
        timeout=60,
        check=True,
    )
    os.close(theirs)
    drawn = os.read(ours, 65536).decode()
    os.close(ours)
    assert "━" in drawn
    assert b"sequences written" in done.stdout


def test_ctrl_c_exits_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*AT_A_TERMINAL, "prepare", "python-stdlib", "--out", "out.parquet", "--processes", "2"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        children = wait_for_children(process)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())
    assert not psutil.wait_procs(children, timeout=30)[1]


def wait_for_children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The tokenising processes, once they run."""
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return children


def test_doctor_finds_what_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    report = json.loads(spoken(capsys)[0])
    assert report["ok"] is True
    found = {finding["name"]: finding for finding in report["findings"]}
    facts = machine_facts()
    assert found["torch"]["value"] == facts["versions"]["torch"]
    assert found["megatron-core"]["value"] == facts["versions"]["megatron-core"]
    for kind, kernel in facts["attention_kernels"].items():
        if kind != "flash-attn package":
            assert found[f"attention, {kind}"]["value"] == kernel
    assert {"python", "cores", "memory", "shared memory", "planner cache", "ray"} <= set(found)


def test_doctor_says_what_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, object]:
        raise HydraError("the workers' libraries cannot be loaded", value="no module named torch")

    monkeypatch.setattr("hydra_ray.machine.worker_facts", broken)
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 80)
    assert run(["doctor"]) == 1
    text, _ = spoken(capsys)
    assert "LACK  torch and Megatron  no module named torch" in text
    assert "lacking: torch and Megatron, temporary folder" in text
    assert "Set TMPDIR to a shorter path." in text
