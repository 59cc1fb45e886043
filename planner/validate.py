"""Every invariant of a plan, in one place."""

import numpy as np

from planner.errors import PlanError
from planner.plan import Plan, group_tokens


def validate(plan: Plan) -> None:
    """Check a plan against its pool. O(N + K log K).

    A sequence is in exactly one group; a group has sequences, a legal size, an aligned start, a
    Ulysses degree that divides it, and keeps the token budget on each rank; groups of one
    microbatch share no rank and stand in order; the pipeline accepts the number of microbatches.
    A rank without a group is idle, which is legal.

    Raises:
        PlanError: the first broken invariant, with the value and the limit.
    """
    for check in (
        _check_shapes,
        _check_members,
        _check_microbatches,
        _check_groups,
        _check_ranks,
        _check_budget,
    ):
        check(plan)


def _check_shapes(plan: Plan) -> None:
    groups = len(plan.group_size)
    for name in ("group_microbatch", "group_start", "group_ulysses"):
        _require_equal(f"Entries of {name}", len(getattr(plan, name)), groups)
    _require_equal("Entries of group_offsets", len(plan.group_offsets), groups + 1)
    _require_equal("Entries of members", len(plan.members), len(plan.lengths))
    if plan.lengths.size and plan.lengths.min() <= 0:
        raise PlanError(
            "A sequence has no tokens", value=int(plan.lengths.min()), limit="at least 1"
        )
    if not np.isfinite(plan.target_s) or plan.target_s < 0:
        raise PlanError("The target is not a load", value=plan.target_s, limit="finite, >= 0")


def _check_members(plan: Plan) -> None:
    _require_equal("The first group offset", int(plan.group_offsets[0]), 0)
    _require_equal("The last group offset", int(plan.group_offsets[-1]), len(plan.members))
    empty = np.flatnonzero(np.diff(plan.group_offsets) <= 0)
    if empty.size:
        raise PlanError("A group has no sequences", value=f"group {int(empty[0])}")
    outside = (plan.members < 0) | (plan.members >= plan.num_sequences)
    if outside.any():
        raise PlanError(
            "A group names a sequence the batch does not have",
            value=int(plan.members[outside][0]),
            limit=f"0 to {plan.num_sequences - 1}",
        )
    times = np.bincount(plan.members, minlength=plan.num_sequences)
    wrong = np.flatnonzero(times != 1)
    if wrong.size:
        place = int(wrong[0])
        raise PlanError(
            f"The sequence at place {place} is not planned exactly once",
            value=f"{int(times[place])} times",
            limit="1 time",
        )


def _check_microbatches(plan: Plan) -> None:
    count = plan.num_microbatches
    legal = plan.pool.legal_num_microbatches(count) if plan.num_sequences else 0
    if count != legal:
        raise PlanError(
            f"{plan.pool.stages} stages of {plan.pool.chunks} chunks cannot run this many "
            "microbatches",
            value=count,
            limit=legal,
        )
    outside = (plan.group_microbatch < 0) | (plan.group_microbatch >= count)
    if outside.any():
        raise PlanError(
            "A group is in a microbatch the plan does not have",
            value=int(plan.group_microbatch[outside][0]),
            limit=f"0 to {count - 1}",
        )


def _check_groups(plan: Plan) -> None:
    illegal = ~np.isin(plan.group_size, plan.pool.degrees)
    if illegal.any():
        raise PlanError(
            "A group's size is not a legal degree",
            value=int(plan.group_size[illegal][0]),
            limit=plan.pool.degrees,
        )
    crooked = plan.group_start % plan.group_size != 0
    if crooked.any():
        group = int(np.flatnonzero(crooked)[0])
        raise PlanError(
            f"Group {group} is not aligned",
            value=f"start {int(plan.group_start[group])}",
            limit=f"a multiple of its size {int(plan.group_size[group])}",
        )
    ulysses = plan.group_ulysses
    unsplit = (ulysses < 1) | (plan.group_size % np.maximum(ulysses, 1) != 0)
    if unsplit.any():
        group = int(np.flatnonzero(unsplit)[0])
        raise PlanError(
            f"Group {group} has a Ulysses degree that does not divide its size",
            value=int(ulysses[group]),
            limit=f"a divisor of {int(plan.group_size[group])}",
        )


def _check_ranks(plan: Plan) -> None:
    ends = plan.group_start + plan.group_size
    outside = (plan.group_start < 0) | (ends > plan.pool.num_ranks)
    if outside.any():
        group = int(np.flatnonzero(outside)[0])
        raise PlanError(
            f"Group {group} has ranks the pool does not have",
            value=f"ranks {int(plan.group_start[group])} to {int(ends[group]) - 1}",
            limit=f"0 to {plan.pool.num_ranks - 1}",
        )
    # On one axis of (microbatch, rank), ordered disjoint groups never step back.
    offset = plan.group_microbatch * plan.pool.num_ranks
    overlap = np.flatnonzero((plan.group_start + offset)[1:] < (ends + offset)[:-1])
    if overlap.size:
        raise PlanError(
            "Groups share a rank, or are not in order of microbatch and rank",
            value=f"groups {int(overlap[0])} and {int(overlap[0]) + 1}",
        )


def _check_budget(plan: Plan) -> None:
    on_each_rank = group_tokens(plan)
    over = np.flatnonzero(on_each_rank > plan.pool.token_budget)
    if over.size:
        group = int(over[0])
        raise PlanError(
            f"Group {group} exceeds the token budget",
            value=f"{int(on_each_rank[group])} tokens on each rank",
            limit=f"{plan.pool.token_budget} tokens",
        )


def _require_equal(what: str, value: int, limit: int) -> None:
    if value != limit:
        raise PlanError(f"{what} is wrong", value=value, limit=limit)
