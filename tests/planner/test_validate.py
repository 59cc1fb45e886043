"""Every invariant is checked: each corruption of a good plan is refused, and says why."""

from dataclasses import replace

import numpy as np
import pytest

from planner.errors import PlanError
from planner.hydra import hydra
from planner.plan import empty_plan
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.validate import validate

POOL = PoolShape(num_ranks=8, token_budget=1024, stages=2, chunks=2)


@pytest.fixture(scope="module")
def plan():
    lengths = np.array([4000, 1500, 900, 800, 700, 600, 500, 400, 300, 200, 100, 90, 80, 70, 60])
    good = hydra().plan(lengths, POOL, DENSE)
    validate(good)
    assert good.num_groups >= 4
    return good


def changed(array, at, value):
    copy = array.copy()
    copy[at] = value
    return copy


def corruptions(plan):
    last = plan.num_groups - 1
    widest = int(plan.group_size.argmax())
    yield "exactly once", {"members": changed(plan.members, 0, plan.members[1])}
    yield "does not have", {"members": changed(plan.members, 0, plan.num_sequences)}
    yield "does not have", {"members": changed(plan.members, 0, -1)}
    yield "Entries of members", {"members": plan.members[:-1]}
    yield "Entries of group_start", {"group_start": plan.group_start[:-1]}
    yield "Entries of group_ulysses", {"group_ulysses": np.append(plan.group_ulysses, 1)}
    yield "Entries of group_offsets", {"group_offsets": plan.group_offsets[:-1]}
    yield "first group offset", {"group_offsets": changed(plan.group_offsets, 0, 1)}
    yield "last group offset", {"group_offsets": changed(plan.group_offsets, -1, 14)}
    yield "no sequences", {"group_offsets": changed(plan.group_offsets, 1, 0)}
    yield "no tokens", {"lengths": changed(plan.lengths, 3, 0)}
    yield "not a load", {"target_s": float("nan")}
    yield "this many", {"num_microbatches": plan.num_microbatches + 1}
    yield "this many", {"num_microbatches": 0}
    yield (
        "microbatch the plan does not",
        {"group_microbatch": changed(plan.group_microbatch, last, 99)},
    )
    yield "not a legal degree", {"group_size": changed(plan.group_size, last, 3)}
    yield "not aligned", {"group_start": changed(plan.group_start, widest, 1)}
    yield "does not divide", {"group_ulysses": changed(plan.group_ulysses, widest, 3)}
    yield "does not divide", {"group_ulysses": changed(plan.group_ulysses, widest, 0)}
    yield "pool does not have", {"group_start": changed(plan.group_start, last, 8)}
    yield "pool does not have", {"group_start": changed(plan.group_start, last, -8)}
    yield "share a rank", {"group_start": np.zeros_like(plan.group_start)}
    yield "token budget", {"lengths": changed(plan.lengths, int(plan.members[0]), 9000)}
    yield "token budget", {"pool": replace(POOL, token_budget=512)}


def test_each_corruption_is_refused(plan):
    for message, fields in corruptions(plan):
        with pytest.raises(PlanError, match=message):
            validate(replace(plan, **fields))


def test_groups_out_of_order_are_refused(plan):
    order = np.arange(plan.num_groups)
    order[[0, 1]] = [1, 0]
    sizes = np.diff(plan.group_offsets)[order]
    shuffled = replace(
        plan,
        group_microbatch=plan.group_microbatch[order],
        group_start=plan.group_start[order],
        group_size=plan.group_size[order],
        group_ulysses=plan.group_ulysses[order],
        group_offsets=np.concatenate(([0], np.cumsum(sizes))),
        members=np.concatenate([plan.group_members(group) for group in order]),
    )
    with pytest.raises(PlanError, match="in order"):
        validate(shuffled)


def test_an_idle_rank_and_an_empty_microbatch_are_legal(plan):
    validate(replace(plan, num_microbatches=plan.num_microbatches + 2))


def test_an_empty_plan_is_valid():
    validate(empty_plan("hydra", POOL))


def test_digest_tells_every_field_apart(plan):
    digests = {plan.digest()}
    for _, fields in corruptions(plan):
        digests.add(replace(plan, **fields).digest())
    assert len(digests) == 1 + sum(1 for _ in corruptions(plan))


def test_group_of_rank_agrees_with_the_groups(plan):
    for microbatch in range(plan.num_microbatches):
        for rank in range(POOL.num_ranks):
            group = plan.group_of_rank(microbatch, rank)
            held = [
                g
                for g in range(plan.num_groups)
                if plan.group_microbatch[g] == microbatch
                and plan.group_start[g] <= rank < plan.group_start[g] + plan.group_size[g]
            ]
            assert held == ([] if group is None else [group])
