"""`hydra-ray plan`: every format of lengths, one planner or all, text, JSON and a drawing."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from hydra_ray.cli.app import run
from hydra_ray.data.lengths_file import read_lengths
from planner.errors import InputError
from planner.registry import planner_names

LENGTHS = [3000, 20, 700, 20, 1500]
POOL = ["--ranks", "4", "--token-budget", "1024"]


def write(path: Path, kind: str) -> Path:
    table = pa.table({"length": LENGTHS, "source": list("abcde")})
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "csv":
        pacsv.write_csv(table, path)
    elif kind == "plain csv":
        path.write_text("".join(f"{length}\n" for length in LENGTHS))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"length": length}) + "\n" for length in LENGTHS))
    elif kind == "plain jsonl":
        path.write_text("".join(f"{length}\n" for length in LENGTHS))
    else:
        np.save(path, np.array(LENGTHS, dtype=np.int32))
    return path


@pytest.fixture
def lengths_file(tmp_path):
    return write(tmp_path / "lengths.parquet", "parquet")


@pytest.mark.parametrize("kind", ["parquet", "csv", "plain csv", "jsonl", "plain jsonl", "npy"])
def test_every_format_gives_the_same_lengths(tmp_path, kind):
    path = write(tmp_path / f"lengths.{kind.split()[-1]}", kind)
    assert read_lengths(path).tolist() == LENGTHS


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("lengths.txt", b"5", "kind of file"),
        ("lengths.parquet", b"PAR1 not really", "cannot be read"),
        ("lengths.csv", b"tokens,source\n5,a\n", "No column length"),
        ("lengths.csv", b"length\n5.5\n", "whole numbers"),
        ("lengths.csv", b"length,source\n5,a\n,b\n", "rows without one"),
        ("lengths.jsonl", b'{"tokens": 5, "source": "a"}\n', "No column length"),
        ("lengths.jsonl", b"{oops\n", "cannot be read"),
        ("lengths.npy", b"\x00\x01", "cannot be read"),
    ],
)
def test_files_that_have_no_lengths_are_refused(tmp_path, name, content, what):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=what):
        read_lengths(path)


def test_json_has_every_figure_of_every_planner(lengths_file, capsys):
    assert run(["plan", str(lengths_file), *POOL, "--compare", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["sequences"], answer["tokens"]) == (5, sum(LENGTHS))
    assert [plan["planner"] for plan in answer["plans"]] == list(planner_names())
    for plan in answer["plans"]:
        assert plan["iteration_s"] >= plan["bound_s"] > 0
        assert plan["bound_ratio"] == pytest.approx(plan["iteration_s"] / plan["bound_s"])
        assert plan["tokens_max"] <= 1024
        assert plan["plan_s"] > 0
        ranks = sum(plan["ranks_of_degree"].values())
        assert ranks + plan["idle_slots"] == 4 * plan["num_microbatches"]


def test_text_names_what_a_person_asks_for(lengths_file, capsys):
    assert run(["plan", str(lengths_file), *POOL, "--planner", "static"]) == 0
    text = capsys.readouterr().out
    for words in ("microbatches", "load max / mean", "over the lower bound", "planning time"):
        assert words in text
    assert "4 x " in text


def test_context_cuts_and_batch_tokens_draw(lengths_file, capsys):
    command = ["plan", str(lengths_file), *POOL, "--context", "1000", "--json"]
    assert run(command) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["cut_to_context"], whole["tokens"]) == (2, 1000 + 20 + 700 + 20 + 1000)
    assert run([*command, "--batch-tokens", "1800"]) == 0
    drawn = json.loads(capsys.readouterr().out)
    assert 0 < drawn["tokens"] <= 1800


def test_drawing_has_every_group_and_its_sequences(lengths_file, tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert run(["plan", str(lengths_file), *POOL, "--html", str(page), "--json"]) == 0
    groups = sum(json.loads(capsys.readouterr().out)["plans"][0]["groups_of_degree"].values())
    html = page.read_text()
    assert html.count("<title>MB ") == groups
    for place, length in enumerate(LENGTHS):
        assert f"#{place}: {length:,}" in html


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--ranks", "0", "--token-budget", "1024"], "num_ranks"),
        (["--ranks", "2", "--token-budget", "1024"], "does not fit"),
        ([*POOL, "--planner", "hydar"], "Did you mean hydra"),
        ([*POOL, "--cost", "huge"], "preset"),
    ],
)
def test_bad_input_exits_with_2_and_a_reason(lengths_file, capsys, options, what):
    assert run(["plan", str(lengths_file), *options]) == 2
    assert what in capsys.readouterr().err


def test_a_missing_file_exits_with_2(tmp_path, capsys):
    assert run(["plan", str(tmp_path / "none.parquet"), *POOL]) == 2
    assert "No such file" in capsys.readouterr().err
