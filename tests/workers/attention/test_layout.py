"""Every token on one rank, causal work even, and after Ulysses a zigzag shard of the ring."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from workers.attention.layout import (
    CACHED_LAYOUTS,
    CPGroups,
    ring_layout,
    shard_lengths,
    ulysses_index,
    zigzag_index,
)

factors = st.tuples(st.integers(1, 6), st.integers(1, 4))
chunks = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def test_two_sequences_of_eight_at_degree_two():
    assert zigzag_index((8, 8), 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert zigzag_index((8, 8), 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def test_degree_one_holds_everything_and_needs_no_padding():
    assert zigzag_index((3, 5), 1, 0).tolist() == list(range(8))


@given(chunks, factors)
def test_ranks_share_all_tokens_and_causal_work_evenly(sizes, factor):
    degree = factor[0] * factor[1]
    lengths = tuple(2 * degree * size for size in sizes)
    shards = [zigzag_index(lengths, degree, rank) for rank in range(degree)]
    assert sorted(np.concatenate(shards)) == list(range(sum(lengths)))
    position = np.concatenate([np.arange(length) for length in lengths])
    if degree > 1:
        assert len({int(position[shard].sum()) for shard in shards}) == 1


@given(chunks, factors)
def test_ulysses_rows_form_the_zigzag_shard_of_the_ring(sizes, factor):
    ulysses, ring = factor
    degree = ulysses * ring
    lengths = tuple(2 * degree * size for size in sizes)
    index = ulysses_index(shard_lengths(lengths, degree), ulysses)
    for ring_rank in range(ring):
        members = range(ring_rank * ulysses, (ring_rank + 1) * ulysses)
        gathered = np.concatenate([zigzag_index(lengths, degree, rank) for rank in members])
        assert gathered[index].tolist() == zigzag_index(lengths, ring, ring_rank).tolist()


def test_each_step_of_a_ring_sees_exactly_the_causal_pairs():
    """Every query-key pair of the causal mask is computed once, on one rank, in one step."""
    lengths, ring = (16, 8), 4
    sequence = np.repeat(np.arange(2), lengths)
    seen = np.zeros((24, 24), dtype=int)
    layout = ring_layout(shard_lengths(lengths, ring), ring, torch.device("cpu"))
    tokens = [zigzag_index(lengths, ring, rank) for rank in range(ring)]
    for rank in range(ring):
        for source in range(ring):
            step = layout.step(source, rank)
            queries = tokens[rank][_all_or(step.query_rows)]
            keys = tokens[source][_all_or(step.key_rows)]
            pairs = sequence[queries][:, None] == sequence[keys][None, :]
            if step.block.causal:
                pairs &= queries[:, None] >= keys[None, :]
            seen[np.ix_(queries, keys)] += pairs
    causal = np.tril(np.ones((24, 24), dtype=int))
    assert (seen == causal * (sequence[:, None] == sequence[None, :])).all()


def _all_or(rows):
    return slice(None) if rows is None else rows.numpy()


def test_empty_sequences_take_no_part():
    layout = ring_layout((0, 4, 0, 2), 2, torch.device("cpu"))
    assert layout.own.block.queries.lengths == (4, 2)
    assert layout.from_later.query_rows.tolist() == [2, 3, 5]


@pytest.mark.parametrize("lengths", [(8, 6), (2,)])
def test_a_length_that_cannot_be_cut_is_refused(lengths):
    with pytest.raises(InputError, match="multiples of 8"):
        zigzag_index(lengths, 4, 0)


def test_indices_are_shared_and_so_cannot_be_written_to():
    index = zigzag_index((8, 8), 2, 0)
    assert zigzag_index((8, 8), 2, 0) is index
    with pytest.raises(ValueError, match="read-only"):
        index[0] = 1


def test_only_layouts_of_microbatches_in_flight_are_kept():
    """Layouts hold device tensors: as many as were ever asked for would fill a GPU."""
    seen = [ring_layout((2 * size,), 2, torch.device("cpu")) for size in range(1, 100)]
    alive = weakref.WeakSet(step.query_rows for step in (layout.from_later for layout in seen))
    assert len(alive) == 99
    newest = seen[-1]
    del seen
    gc.collect()
    assert len(alive) == CACHED_LAYOUTS
    assert ring_layout((2 * 99,), 2, torch.device("cpu")) is newest


def test_places_in_a_group():
    groups = CPGroups(degree=6, ulysses=2, rank=5)
    assert (groups.ring_degree, groups.ring_rank) == (3, 2)
