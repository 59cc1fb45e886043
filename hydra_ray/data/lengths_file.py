"""Lengths from a file: a corpus, or any Parquet, CSV, JSON lines or npy file that has them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from planner.errors import InputError

COLUMN = "length"
REMEDY = "Name the column with --column, or write one integer a line to a .csv file."

IntArray = npt.NDArray[np.int64]


def read_lengths(path: Path, column: str = COLUMN) -> IntArray:
    """[N] lengths, in the file's order.

    A table with one column needs no name for it; JSON lines may be bare numbers or objects; a
    CSV file may lack its heading.

    Args:
        path: ends in .parquet, .csv, .jsonl or .npy.
        column: where tables and objects keep the length.

    Raises:
        InputError: no such file, an unknown or broken format, no such column, not whole numbers.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            "Lengths cannot be read from this kind of file", value=path, limit=", ".join(READERS)
        )
    if not path.is_file():
        raise InputError("No such file of lengths", value=path)
    try:
        values = reader(path, column)
    except (pa.ArrowInvalid, ValueError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            "The file of lengths cannot be read", value=path, limit=str(error), remedy=REMEDY
        ) from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(
            "Lengths must be one column of whole numbers",
            value=f"{path} with {values.dtype} of shape {values.shape}",
            remedy=REMEDY,
        )
    return values.astype(np.int64)


def _read_parquet(path: Path, column: str) -> npt.NDArray[np.generic]:
    file = pq.ParquetFile(path)
    name = _column_of(file.schema_arrow.names, column, path)
    return _as_array(file.read(columns=[name])[name], path)


def _read_csv(path: Path, column: str) -> npt.NDArray[np.generic]:
    first = path.open().readline().strip()
    has_heading = not first.isdecimal()
    options = pacsv.ReadOptions(column_names=None if has_heading else [column])
    table = pacsv.read_csv(path, read_options=options)
    return _as_array(table[_column_of(table.column_names, column, path)], path)


def _read_json_lines(path: Path, column: str) -> npt.NDArray[np.generic]:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if rows and isinstance(rows[0], dict):
        name = _column_of(list(rows[0]), column, path)
        rows = [row.get(name) for row in rows]
    return np.array(rows)


def _read_npy(path: Path, _column: str) -> npt.NDArray[np.generic]:
    return np.asarray(np.load(path, allow_pickle=False))


READERS: dict[str, Callable[[Path, str], npt.NDArray[np.generic]]] = {
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".jsonl": _read_json_lines,
    ".npy": _read_npy,
}


def _column_of(names: list[str], wanted: str, path: Path) -> str:
    if wanted in names:
        return wanted
    if len(names) == 1 and wanted == COLUMN:
        return names[0]
    raise InputError(
        f"No column {wanted} in the file of lengths",
        value=path,
        limit=f"columns {', '.join(names)}",
        remedy=REMEDY,
    )


def _as_array(values: pa.ChunkedArray, path: Path) -> npt.NDArray[np.generic]:
    if values.null_count:
        raise InputError(
            "The file of lengths has rows without one", value=path, limit="no missing values"
        )
    array: npt.NDArray[np.generic] = values.to_numpy()
    return array
