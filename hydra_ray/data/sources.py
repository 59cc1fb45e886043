"""Finds documents: folders of text or code, JSONL, Parquet, or the running Python's own library.

Sources are cut into chunks of a few MiB that processes read on their own. Everything is walked in
sorted order, so the same sources give the same documents in the same order.
"""

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from hydra_ray.data.corpus import open_parquet
from planner.errors import InputError

PYTHON_STDLIB = "python-stdlib"
CHUNK_BYTES = 4 << 20
READ_BATCH_ROWS = 256
JSONL_SUFFIXES = (".jsonl", ".ndjson")
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one process reads at a time.

    "files": each of `paths` is a document. "jsonl": the lines of `paths[0]` that start at byte
    `start` or later and before `stop`. "parquet": row group `start` of `paths[0]`.
    """

    kind: Literal["files", "jsonl", "parquet"]
    paths: tuple[str, ...]
    num_bytes: int
    start: int = 0
    stop: int = 0


def find_chunks(sources: Sequence[str], text_column: str) -> Iterator[Chunk]:
    """All chunks of all sources, in order, found as they are asked for.

    Raises:
        InputError: a source does not exist, or is a Parquet file without the text column.
    """
    files: list[str] = []
    size = 0
    for path in _walk_all(sources):
        if path.suffix in (*JSONL_SUFFIXES, ".parquet"):
            yield from _container_chunks(path, text_column)
            continue
        files.append(str(path))
        size += path.stat().st_size
        if size >= CHUNK_BYTES:
            yield Chunk(kind="files", paths=tuple(files), num_bytes=size)
            files, size = [], 0
    if files:
        yield Chunk(kind="files", paths=tuple(files), num_bytes=size)


def read_documents(chunk: Chunk, text_column: str) -> Iterator[str | None]:
    """The texts of a chunk; None for a file that is not text.

    Raises:
        InputError: a line is not a JSON object with that column as text, or the file is damaged.
    """
    if chunk.kind == "files":
        return _read_files(chunk)
    if chunk.kind == "jsonl":
        return _read_jsonl(chunk, text_column)
    return _read_parquet(chunk, text_column)


def _walk_all(sources: Sequence[str]) -> Iterator[Path]:
    for source in sources:
        if source == PYTHON_STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            yield from (p for p in _walk(root, STDLIB_SKIPPED) if p.suffix == ".py")
            continue
        path = Path(source)
        if not path.exists():
            raise InputError(
                "no such source",
                value=source,
                limit=f"a folder, a file, or {PYTHON_STDLIB}",
                remedy="Check the path; it is relative to the current directory.",
            )
        if path.is_file():
            yield path
        else:
            yield from _walk(path, frozenset())


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Regular files under `root`, sorted; what begins with a dot is left out."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in skipped)
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _container_chunks(path: Path, text_column: str) -> Iterator[Chunk]:
    if path.suffix == ".parquet":
        yield from _parquet_chunks(path, text_column)
        return
    size = path.stat().st_size
    for start in range(0, size, CHUNK_BYTES):
        stop = min(size, start + CHUNK_BYTES)
        yield Chunk(
            kind="jsonl", paths=(str(path),), num_bytes=stop - start, start=start, stop=stop
        )


def _parquet_chunks(path: Path, text_column: str) -> Iterator[Chunk]:
    with open_parquet(str(path)) as file:
        _check_text_column(file, path, text_column)
        for group in range(file.num_row_groups):
            num_bytes = file.metadata.row_group(group).total_byte_size
            yield Chunk(kind="parquet", paths=(str(path),), num_bytes=num_bytes, start=group)


def _check_text_column(file: pq.ParquetFile, path: Path, text_column: str) -> None:
    schema = file.schema_arrow
    if text_column not in schema.names:
        raise InputError(
            f"the source has no column {text_column!r}",
            value=f"{path} with columns {', '.join(schema.names)}",
            remedy="Name the column of text: --text-column, or data.text_column in a recipe.",
        )
    kind = schema.field(text_column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(
            f"the column {text_column!r} holds no text", value=f"{kind} in {path}", limit="string"
        )


def _read_files(chunk: Chunk) -> Iterator[str | None]:
    for path in chunk.paths:
        data = Path(path).read_bytes()
        try:
            yield None if b"\0" in data else data.decode("utf-8")
        except UnicodeDecodeError:
            yield None


def _read_jsonl(chunk: Chunk, text_column: str) -> Iterator[str]:
    with Path(chunk.paths[0]).open("rb") as file:
        if chunk.start:
            file.seek(chunk.start - 1)
            file.readline()
        at = file.tell()
        while at < chunk.stop:
            line = file.readline()
            if line.strip():
                yield _json_text(line, chunk.paths[0], at, text_column)
            at += len(line)


def _json_text(line: bytes, path: str, at: int, text_column: str) -> str:
    try:
        row: Any = json.loads(line)
        text = row[text_column]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _bad_line(path, at, text_column, line) from error
    if text is None:
        return ""
    if not isinstance(text, str):
        raise _bad_line(path, at, text_column, line)
    return text


def _bad_line(path: str, at: int, text_column: str, line: bytes) -> InputError:
    with Path(path).open("rb") as file:
        number = file.read(at).count(b"\n") + 1
    shown = line[:80].decode("utf-8", errors="replace").strip()
    return InputError(
        f"a line is no JSON object with text under {text_column!r}",
        value=f"{path}:{number}: {shown}",
        remedy="Correct the line, or name the column of text with --text-column.",
    )


def _read_parquet(chunk: Chunk, text_column: str) -> Iterator[str]:
    path = chunk.paths[0]
    with open_parquet(path) as file:
        batches = file.iter_batches(
            batch_size=READ_BATCH_ROWS, row_groups=[chunk.start], columns=[text_column]
        )
        try:
            for batch in batches:
                yield from (text or "" for text in batch.column(0).to_pylist())
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError("the source is damaged", value=path, limit=str(error)) from error
