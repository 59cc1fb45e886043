"""Global batches cut one endless stream: each epoch's permutation, every sequence once in each."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hydra_ray.data.batches import DataCursor, GlobalBatch, GlobalBatches
from hydra_ray.data.corpus import CorpusInfo
from hydra_ray.data.index import SequenceIndex
from hydra_ray.data.writer import CorpusWriter
from planner.errors import InputError

INFO = CorpusInfo(tokenizer="bytes", tokenizer_digest="", vocab_size=257, context=1000)


def make_index(folder: Path, lengths: list[int]) -> SequenceIndex:
    """Sequence i has id 100 + i and all its tokens equal i."""
    path = folder / "corpus.parquet"
    with CorpusWriter(path, INFO) as writer:
        for i, length in enumerate(lengths):
            writer.add(100 + i, np.full(length, i, np.int32))
    return SequenceIndex(str(path))


def walk(batches: GlobalBatches, cursor: DataCursor, num_batches: int) -> list[GlobalBatch]:
    out = []
    for _ in range(num_batches):
        out.append(batches.next(cursor))
        cursor = out[-1].cursor_after
    return out


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    batch_tokens=st.integers(1, 120),
    seed=st.integers(0, 5),
    stop=st.integers(0, 11),
)
def test_batches_are_the_next_runs_of_the_stream(
    tmp_path: Path, lengths: list[int], batch_tokens: int, seed: int, stop: int
) -> None:
    index = make_index(tmp_path, lengths)
    batches = walk(
        GlobalBatches(index, seed=seed, batch_tokens=batch_tokens), DataCursor(), num_batches=12
    )
    taken = np.concatenate([batch.sequence_ids for batch in batches])
    epochs = -(-len(taken) // len(index)) + 1
    stream = np.concatenate([index.ids[index.order(seed, epoch)] for epoch in range(epochs)])
    np.testing.assert_array_equal(taken, stream[: len(taken)])
    for start in range(0, len(taken) - len(index) + 1, len(index)):
        assert sorted(taken[start : start + len(index)]) == index.ids.tolist()

    place = 0
    for batch in batches:
        assert len(batch.lengths) >= 1
        assert len(batch.lengths) == 1 or batch.lengths.sum() <= batch_tokens
        place += len(batch.lengths)
        following = lengths[int(stream[place]) - 100]
        assert batch.lengths.sum() + following > batch_tokens
        for i, number in enumerate(batch.sequence_ids - 100):
            tokens = batch.tokens[batch.token_offsets[i] : batch.token_offsets[i + 1]]
            assert tokens.tolist() == [number] * lengths[number]
    assert batches[-1].cursor_after == DataCursor(*divmod(place, len(index)))

    saved = json.loads(json.dumps(batches[stop].cursor_after.to_dict()))
    resumed = GlobalBatches(index, seed=seed, batch_tokens=batch_tokens)
    for old, new in zip(
        batches[stop + 1 :], walk(resumed, DataCursor.from_dict(saved), 11 - stop), strict=True
    ):
        np.testing.assert_array_equal(old.sequence_ids, new.sequence_ids)
        np.testing.assert_array_equal(old.tokens, new.tokens)
        assert old.cursor_after == new.cursor_after


def test_batches_are_read_only(tmp_path: Path) -> None:
    batch = GlobalBatches(make_index(tmp_path, [3, 4]), seed=0, batch_tokens=7).next(DataCursor())
    with pytest.raises(ValueError, match="read-only"):
        batch.tokens[0] = 1


@pytest.mark.parametrize("cursor", [DataCursor(0, 2), DataCursor(0, -1), DataCursor(-1, 0)])
def test_a_cursor_of_another_corpus_is_refused(tmp_path: Path, cursor: DataCursor) -> None:
    batches = GlobalBatches(make_index(tmp_path, [3, 4]), seed=0, batch_tokens=7)
    with pytest.raises(InputError, match="no place in this corpus"):
        batches.next(cursor)
