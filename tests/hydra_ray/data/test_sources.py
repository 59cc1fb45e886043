"""Documents are found in order, whole, and once, however the sources are cut into chunks."""

import json
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydra_ray.data import sources
from hydra_ray.data.sources import find_chunks, read_documents
from planner.errors import InputError


def read_all(*names: str | Path, column: str = "text") -> list[str | None]:
    chunks = find_chunks([str(name) for name in names], column)
    return [text for chunk in chunks for text in read_documents(chunk, column)]


def test_folder_is_walked_in_order_without_hidden_or_binary_files(tmp_path: Path) -> None:
    for name, data in {
        "b.txt": b"second",
        "a/z.py": b"fourth",
        "a/b.md": b"third",
        "A.txt": b"first",
        ".git/config": b"hidden",
        ".env": b"hidden",
        "picture": b"\x89PNG\0",
        "latin1.txt": "é".encode("latin-1"),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert read_all(tmp_path) == ["first", "second", None, None, "third", "fourth"]


def test_standard_library_is_python_sources_without_installed_packages() -> None:
    root = sysconfig.get_path("stdlib")
    paths = [path for chunk in find_chunks(["python-stdlib"], "text") for path in chunk.paths]
    assert f"{root}/json/decoder.py" in paths
    assert all(path.endswith(".py") for path in paths)
    assert not any("site-packages" in path for path in paths)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None
)
@given(
    texts=st.lists(st.text(max_size=30), max_size=20),
    chunk_bytes=st.integers(3, 200),
    last_newline=st.booleans(),
    blank_lines=st.booleans(),
)
def test_jsonl_lines_come_once_at_any_chunk_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str],
    chunk_bytes: int,
    last_newline: bool,
    blank_lines: bool,
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk_bytes)
    separator = "\n\n" if blank_lines else "\n"
    lines = separator.join(json.dumps({"text": text}) for text in texts)
    path = tmp_path / "documents.jsonl"
    path.write_text(lines + "\n" * last_newline, encoding="utf-8")
    assert read_all(path) == texts
    whole = sum(chunk.num_bytes for chunk in find_chunks([str(path)], "text"))
    assert whole == path.stat().st_size


def test_parquet_reads_every_row_group_and_null_is_empty(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(1000)]
    path = tmp_path / "documents.parquet"
    table = pa.table({"body": [*texts, None], "other": range(1001)})
    pq.write_table(table, path, row_group_size=300)
    assert read_all(path, column="body") == [*texts, ""]


def test_jsonl_null_is_empty_and_other_columns_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": null, "n": 1}\n{"n": [2], "text": "b"}\n')
    assert read_all(path) == ["", "b"]


@pytest.mark.parametrize(
    ("bad_line", "shown"),
    [
        ("{not json", "documents.jsonl:3: {not json"),
        ('{"body": "x"}', 'documents.jsonl:3: {"body": "x"}'),
        ('["a", "b"]', "documents.jsonl:3"),
        ('{"text": 7}', "documents.jsonl:3"),
    ],
)
def test_bad_line_is_named_by_its_number(tmp_path: Path, bad_line: str, shown: str) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "a"}\n\n' + bad_line + "\n")
    with pytest.raises(InputError) as error:
        read_all(path)
    assert shown in str(error.value.value)
    assert "--text-column" in error.value.remedy


def test_missing_source_and_missing_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such source") as missing:
        read_all(tmp_path / "absent")
    assert missing.value.value == str(tmp_path / "absent")
    path = tmp_path / "documents.parquet"
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), path)
    with pytest.raises(InputError, match="no column 'text'") as column:
        read_all(path)
    assert "columns body, n" in str(column.value.value)
    with pytest.raises(InputError, match="holds no text"):
        read_all(path, column="n")
