"""The stream of global batches: a function of corpus, seed and cursor, never of the workers.

The stream is epoch 0's order, then epoch 1's, and so on without end; a batch is the next run of
whole sequences on it. So a batch may straddle an epoch edge, every sequence comes exactly once an
epoch, and only the cursor need be saved to go on.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hydra_ray.data.index import SequenceIndex
from planner.errors import InputError


@dataclass(frozen=True, slots=True)
class DataCursor:
    """The next sequence to train on: its place in the order of its epoch."""

    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain values for a manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The cursor that `to_dict` wrote."""
        return cls(epoch=int(values["epoch"]), position=int(values["position"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The sequences of one step, in stream order. Arrays are read-only.

    Args:
        sequence_ids: [N] int64, stable across runs.
        lengths: [N] int64, tokens of each sequence, unpadded.
        tokens: [sum of lengths] int32, the sequences one after the other.
        token_offsets: [N + 1] int64, sequence i is `tokens[token_offsets[i]:token_offsets[i + 1]]`.
        cursor_after: where the next batch starts.
    """

    sequence_ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    token_offsets: npt.NDArray[np.int64]
    cursor_after: DataCursor

    def __post_init__(self) -> None:
        for name in ("sequence_ids", "lengths", "tokens", "token_offsets"):
            getattr(self, name).setflags(write=False)


class GlobalBatches:
    """Cuts the stream of sequences into batches of at most `batch_tokens` tokens.

    Args:
        index: the corpus.
        seed: with the epoch number, decides the order.
        batch_tokens: a batch takes whole sequences until the next one would exceed this; a
            sequence longer than this is a batch of its own.
    """

    def __init__(self, index: SequenceIndex, *, seed: int, batch_tokens: int) -> None:
        self._index, self._seed, self._batch_tokens = index, seed, batch_tokens
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._ends: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def next(self, cursor: DataCursor) -> GlobalBatch:
        """The batch that starts at `cursor`.

        Costs O(corpus) at the first batch of an epoch, then O(batch) and the reading of it.

        Raises:
            InputError: the cursor is no place in this corpus.
        """
        self._check(cursor)
        rows, after = self._rows(cursor)
        lengths = self._index.lengths[rows]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        return GlobalBatch(
            sequence_ids=self._index.ids[rows],
            lengths=lengths,
            tokens=self._index.tokens(rows),
            token_offsets=offsets,
            cursor_after=after,
        )

    def _check(self, cursor: DataCursor) -> None:
        if cursor.epoch < 0 or not 0 <= cursor.position < len(self._index):
            raise InputError(
                "the data cursor is no place in this corpus",
                value=f"epoch {cursor.epoch}, position {cursor.position}",
                limit=f"positions 0..{len(self._index) - 1}",
                remedy="Resume with the corpus the run was started with.",
            )

    def _rows(self, cursor: DataCursor) -> tuple[npt.NDArray[np.int64], DataCursor]:
        """The corpus rows of the batch at `cursor`, and the cursor after it."""
        parts: list[npt.NDArray[np.int64]] = []
        room, epoch, position = self._batch_tokens, cursor.epoch, cursor.position
        while True:
            self._enter(epoch)
            before = self._ends[position - 1] if position else 0
            stop = int(np.searchsorted(self._ends, before + room, side="right"))
            if not parts:
                stop = max(stop, position + 1)
            parts.append(self._order[position:stop])
            if stop < len(self._index):
                return np.concatenate(parts), DataCursor(epoch, stop)
            room -= int(self._ends[-1] - before)
            epoch, position = epoch + 1, 0
            if room <= 0:
                return np.concatenate(parts), DataCursor(epoch, 0)

    def _enter(self, epoch: int) -> None:
        """Make `epoch` the one whose order is at hand."""
        if epoch == self._epoch:
            return
        self._order = self._index.order(self._seed, epoch)
        self._ends = np.cumsum(self._index.lengths[self._order])
        self._epoch = epoch
