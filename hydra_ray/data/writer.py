"""Writes a corpus file whole or not at all."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hydra_ray.data.corpus import ROW_GROUP_TOKENS, CorpusInfo, corpus_schema


class CorpusWriter:
    """Takes sequences one by one; the file appears under its name when the block ends well.

    Memory: one row group. An exception inside the block leaves nothing behind.
    """

    def __init__(self, out: Path, info: CorpusInfo) -> None:
        self._out, self._schema = out, corpus_schema(info)
        self._partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
        self._ids: list[int] = []
        self._sequences: list[npt.NDArray[np.int32]] = []
        self._pending_tokens = 0

    def __enter__(self) -> Self:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(
            self._partial, self._schema, compression="zstd", write_page_checksum=True
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
            if kind is None:
                self._partial.replace(self._out)
        finally:
            self._partial.unlink(missing_ok=True)

    def add(self, sequence_id: int, tokens: npt.NDArray[np.int32]) -> None:
        """One sequence; it ends up after those added before."""
        self._ids.append(sequence_id)
        self._sequences.append(tokens)
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= ROW_GROUP_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._ids:
            return
        lengths = np.array([len(tokens) for tokens in self._sequences], np.int32)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        values = pa.array(np.concatenate(self._sequences), pa.int32())
        kind = self._schema.field("tokens").type
        columns = [
            pa.array(self._ids, pa.int64()),
            pa.array(lengths),
            pa.ListArray.from_arrays(pa.array(offsets), values, type=kind),
        ]
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._ids, self._sequences, self._pending_tokens = [], [], 0
