"""What each rank feeds its model: together the ranks of a group hold every token once."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.pool import PoolShape
from tests.workers.layouts import Group, plan_of
from tests.workers.pool import payload_of
from workers.attention.layout import CPGroups
from workers.groups import Place
from workers.microbatch import LocalBatch, local_batches

CPU = torch.device("cpu")


def batches_of(payload, hdp: int) -> list[LocalBatch]:
    """One rank's microbatches; its groups exist by size only."""
    registry = SimpleNamespace(
        place=Place(hdp=hdp, tensor=0, stage=0),
        of=lambda start, size, ulysses: CPGroups(degree=size, ulysses=ulysses, rank=hdp - start),
    )
    return local_batches(payload, registry, CPU, keep_events=False)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    degree=st.sampled_from([1, 2, 3, 4]),
    pad_unit=st.sampled_from([2, 4]),
)
def test_a_groups_ranks_hold_each_sequence_once(lengths: list[int], degree: int, pad_unit: int):
    pool = PoolShape(num_ranks=degree, token_budget=4096, pad_unit=pad_unit)
    payload = payload_of(plan_of([[Group(0, degree, 1, lengths)]], pool))

    shares = [batches_of(payload, hdp)[0] for hdp in range(degree)]

    assert len({len(share.token_ids_T) for share in shares}) == 1
    for place, length in enumerate(lengths):
        mine = [share.microbatch.sequence_T == place for share in shares]
        real = torch.cat([s.microbatch.real_T[m] for s, m in zip(shares, mine, strict=True)])
        masks = torch.cat([s.loss_mask_T[m] for s, m in zip(shares, mine, strict=True)])
        tokens = torch.cat([s.token_ids_T[m] for s, m in zip(shares, mine, strict=True)])
        labels = torch.cat([s.labels_T[m] for s, m in zip(shares, mine, strict=True)])
        first = int(payload.token_offsets[place])
        expected = np.asarray(payload.tokens[first : first + length])
        assert real.sum() == length
        assert masks.sum() == length - 1
        assert sorted(tokens[real].tolist()) == sorted(expected.tolist())
        assert sorted(zip(tokens[masks].tolist(), labels[masks].tolist(), strict=True)) == sorted(
            zip(expected[:-1].tolist(), expected[1:].tolist(), strict=True)
        )


def test_two_sequences_of_eight_at_degree_two():
    payload = payload_of(
        plan_of([[Group(0, 2, 2, [8, 8])]], PoolShape(num_ranks=2, token_budget=64))
    )

    first, second = (batches_of(payload, hdp)[0] for hdp in range(2))

    held = [0, 1, 6, 7, 8, 9, 14, 15]
    assert first.token_ids_T.tolist() == payload.tokens[held].tolist()
    rest = [i for i in range(16) if i not in held]
    assert second.token_ids_T.tolist() == payload.tokens[rest].tolist()
    assert first.loss_mask_T.tolist() == [True] * 3 + [False] + [True] * 3 + [False]


def test_an_idle_rank_joins_with_a_masked_dummy():
    pool = PoolShape(num_ranks=2, token_budget=64, pad_unit=4)
    payload = payload_of(plan_of([[Group(0, 1, 1, [9])]], pool))

    (batch,) = batches_of(payload, 1)

    assert batch.microbatch.idle
    assert len(batch.token_ids_T) == pool.pad_unit
    assert not batch.loss_mask_T.any()
    assert not batch.microbatch.real_T.any()
    assert batch.sequence_ids == ()
