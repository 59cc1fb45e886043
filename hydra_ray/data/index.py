"""Reads a corpus: every id and length at once, tokens only of the rows asked for."""

import hashlib
from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hydra_ray.data.corpus import PREPARE_REMEDY, CorpusInfo, open_parquet, read_info
from planner.errors import InputError

IntArray = npt.NDArray[np.int64]


class SequenceIndex:
    """A corpus of N sequences. Holds 16 bytes a sequence in memory; not safe for threads.

    Args:
        path: the corpus file or URL.

    Raises:
        InputError: the file is absent, truncated, empty, or no corpus.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open_parquet(path)
        self.info: CorpusInfo = read_info(self._file, path)
        self.ids, self.lengths = _read_ids_and_lengths(self._file, path)
        sizes = [
            self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)
        ]
        self._group_starts: IntArray = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole corpus."""
        return int(self.lengths.sum())

    def fingerprint(self) -> str:
        """Equal for corpora that yield the same batches: ids, lengths and tokenizer. O(N)."""
        state = hashlib.blake2b(repr(self.info).encode(), digest_size=16)
        state.update(self.ids.tobytes())
        state.update(self.lengths.tobytes())
        return state.hexdigest()

    def order(self, seed: int, epoch: int) -> IntArray:
        """A permutation of the N rows: a function of (seed, epoch) alone. O(N log N).

        Sorts raw Philox words, whose values numpy keeps from version to version; it does not
        promise that of `Generator.permutation`, and a run must resume under a newer numpy.
        """
        words = np.random.Philox(np.random.SeedSequence((seed, epoch))).random_raw(len(self))
        return np.argsort(words, kind="stable")

    def tokens(self, rows: IntArray) -> npt.NDArray[np.int32]:
        """The tokens of `rows`, one after the other, in the order asked for.

        Reads each row group that holds one of them once: O(tokens of those row groups).

        Raises:
            InputError: the file is damaged.
        """
        ends = np.cumsum(self.lengths[rows])
        out = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
        groups = np.searchsorted(self._group_starts, rows, side="right") - 1
        for group in np.unique(groups):
            places = np.flatnonzero(groups == group)
            local = rows[places] - self._group_starts[group]
            for place, tokens in zip(places, self._read(int(group), local), strict=True):
                end = ends[place]
                out[end - len(tokens) : end] = tokens
        return out

    def _read(self, group: int, local_rows: IntArray) -> Iterable[npt.NDArray[np.int32]]:
        try:
            table = self._file.read_row_group(group, columns=["tokens"])
        except (OSError, pa.ArrowInvalid) as error:
            raise _damaged(self.path, str(error)) from error
        column = table.column("tokens").combine_chunks()
        offsets = column.offsets.to_numpy()
        values = column.values.to_numpy(zero_copy_only=True)
        first = int(self._group_starts[group])
        if not np.array_equal(np.diff(offsets), self.lengths[first : first + len(column)]):
            raise _damaged(self.path, f"row group {group}: lengths and tokens disagree")
        return [values[offsets[row] : offsets[row + 1]] for row in local_rows]


def _read_ids_and_lengths(file: pq.ParquetFile, path: str) -> tuple[IntArray, IntArray]:
    if not file.metadata.num_rows:
        raise InputError(
            "the corpus is empty", value=path, limit="at least 1 sequence", remedy=PREPARE_REMEDY
        )
    try:
        table = file.read(columns=["id", "length"])
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, str(error)) from error
    ids = table.column("id").to_numpy().copy()
    lengths = table.column("length").to_numpy().astype(np.int64)
    if lengths.min() < 1:
        raise _damaged(path, f"a length of {lengths.min()}")
    for array in (ids, lengths):
        array.setflags(write=False)
    return ids, lengths


def _damaged(path: str, how: str) -> InputError:
    return InputError(
        "the corpus is damaged", value=path, limit=how, remedy="Prepare it again from its sources."
    )
