"""The report shows what the records say, in one file that needs nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hydra_ray.cli.app import run
from hydra_ray.report import charts as charts_module
from hydra_ray.report.charts import charts, membership_marks, thin
from hydra_ray.report.page import summarize
from hydra_ray.rundir import RunDirectory


def step(number: int, *, generation: int = 1, num_ranks: int = 4) -> dict[str, Any]:
    return {
        "step": number,
        "time": 1_700_000_000.0 + number,
        "loss": 6.0 - number / 10,
        "tokens": 1000,
        "tokens_per_s": 500.0,
        "wall_s": 2.0,
        "step_s": 1.9,
        "plan_s": 0.01,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "num_sequences": 5,
        "num_microbatches": 2,
        "degrees": {"1": 3, "4": 2} if number % 2 else {"2": 5},
        "load_max_over_mean": 1.25,
        "idle_ranks": 0,
        "predicted_s": 1.5,
        "generation": generation,
        "num_ranks": num_ranks,
        "peak_bytes": 1 << 30,
        "bytes_sent": {"all_to_all": 4_000_000, "ring": 1_000_000},
        "sequence_ids": [1, 2, 3, 4, 5],
    }


STEPS = [
    *(step(n) for n in range(1, 6)),
    *(step(n, generation=2, num_ranks=3) for n in range(6, 11)),
]
EVENTS = [
    {"time": 1_700_000_000.0, "event": "state", "state": "running"},
    {
        "time": 1_700_000_001.0,
        "event": "generation",
        "generation": 1,
        "cause": "start",
        "num_ranks": 4,
        "pause_s": 30.0,
    },
    {
        "time": 1_700_000_006.0,
        "event": "generation",
        "generation": 2,
        "cause": "lost </script><b>worker",
        "num_ranks": 3,
        "pause_s": 0.75,
    },
    {"time": 1_700_000_010.0, "event": "state", "state": "finished"},
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = RunDirectory(tmp_path / "a-run")
    directory.create("name: a-run\nsteps: 10\n")
    for name, records in (("steps", STEPS), ("events", EVENTS)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (directory.root / f"{name}.jsonl").write_text(lines)
    return directory.root


def by_title() -> dict[str, Any]:
    return {chart.title: chart.figure for chart in charts(STEPS, EVENTS)}


def test_charts_carry_the_records() -> None:
    figures = by_title()
    assert list(figures["Loss"].data[0].x) == list(range(1, 11))
    assert list(figures["Loss"].data[0].y) == [record["loss"] for record in STEPS]
    bars = {bar.name: list(bar.y) for bar in figures["Degrees"].data}
    assert bars == {
        "degree 1": [3, 0] * 5,
        "degree 2": [0, 5] * 5,
        "degree 4": [2, 0] * 5,
    }
    assert [area.name for area in figures["Communication"].data] == ["all-to-all", "ring"]
    assert list(figures["Communication"].data[0].y) == [4.0] * 10


def test_every_chart_marks_changes_of_the_pool_but_not_the_start() -> None:
    assert membership_marks(STEPS, EVENTS) == [(6, "lost </script><b>worker → 3 ranks")]
    for figure in by_title().values():
        assert [line.x0 for line in figure.layout.shapes] == [6]


def test_records_without_a_report_leave_a_gap() -> None:
    lost = {**step(11), "loss": None, "grad_norm": None, "lr": None, "bytes_sent": {}}
    figures = {chart.title: chart.figure for chart in charts([*STEPS, lost], EVENTS)}
    assert figures["Loss"].data[0].y[-1] is None
    assert figures["Communication"].data[0].y[-1] == 0


def test_long_runs_are_thinned_evenly_to_their_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts_module, "MOST_POINTS", 4)
    assert [record["step"] for record in thin(STEPS)] == [1, 4, 7, 10]
    assert thin([]) == []
    assert thin(STEPS[:4]) == STEPS[:4]


def test_summary_counts_tokens_pauses_and_losses() -> None:
    figures = summarize("a-run", STEPS, EVENTS)
    assert (figures["state"], figures["steps"], figures["ranks"]) == ("finished", 10, 3)
    assert (figures["first_loss"], figures["last_loss"]) == (5.9, 5.0)
    assert (figures["tokens"], figures["tokens_per_s"]) == (10_000, 500.0)
    assert (figures["pool_changes"], figures["pause_s"]) == (1, 0.75)


def test_page_is_one_file_that_asks_for_nothing(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(run_dir), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["last_loss"] == 5.0
    page = Path(said["report"]).read_text()
    assert page == (run_dir / "report.html").read_text()
    assert not re.search(r"<(script|img)[^>]+src=|<link", page)
    assert "lost &lt;/script&gt;&lt;b&gt;worker" in page
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(scripts) == 2, "text from the records must not end the script"
    listed = re.search(r"const figures = (.*);\n  figures", scripts[1])
    assert listed is not None
    assert len(json.loads(listed[1])) == len(by_title())
    assert "5.900 → 5.000" in page


@pytest.mark.parametrize(("made", "words"), [(False, "no run directory"), (True, "no completed")])
def test_runs_without_steps_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: bool, words: str
) -> None:
    if made:
        RunDirectory(tmp_path / "run").create("name: run\n")
    assert run(["report", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.html"))
