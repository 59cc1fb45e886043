"""The compiled entry points of hydra-opt: the only kernels that Python calls."""

from collections.abc import Callable

import numpy as np

from planner.opt.compiled import entry_point, sources_digest
from planner.opt.draft import Draft, draft_iteration_s, group_loads, make_draft, no_draft
from planner.opt.search import FEW, best_targets
from planner.opt.task import Task, with_totals
from planner.pool import IntArray

# A target whose plan failed costs a try; so many plans that exist are compared, and more where
# sequences are few: estimates take sequences for a fluid.
MOST_TRIES, MOST_PLANS, MOST_PLANS_OF_FEW = 48, 3, 32


def _fill_in(sources: str) -> Callable[[Task], Task]:
    @entry_point
    def fill_in(task: Task) -> Task:
        sources  # noqa: B018  (part of the cache key, see compiled.py)
        return with_totals(task)

    return fill_in


def _best_draft(sources: str) -> Callable[[Task], Draft]:
    @entry_point
    def best_draft(task: Task) -> Draft:
        sources  # noqa: B018
        best, plans = no_draft(task), 0
        most_plans = MOST_PLANS if len(task.lengths) > FEW else MOST_PLANS_OF_FEW
        found = best_targets(task)
        for at in range(min(MOST_TRIES, len(found.target))):
            if plans == most_plans or found.estimate_s[at] >= best.iteration_s:
                break
            draft = make_draft(task, found.target[at], found.num_microbatches[at])
            if draft.iteration_s < np.inf:
                plans += 1
            if draft.iteration_s < best.iteration_s:
                best = draft
        return best

    return best_draft


def _as_draft(sources: str) -> Callable[[Task, int, IntArray, IntArray, IntArray], Draft]:
    @entry_point
    def as_draft(
        task: Task,
        num_microbatches: int,
        microbatch: IntArray,
        degree: IntArray,
        group_of: IntArray,
    ) -> Draft:
        sources  # noqa: B018
        load = group_loads(task, degree, group_of)
        iteration = draft_iteration_s(task, microbatch, load, num_microbatches)
        return Draft(num_microbatches, microbatch, degree, load, group_of, 0.0, iteration)

    return as_draft


_SOURCES = sources_digest()
fill_in = _fill_in(_SOURCES)
best_draft = _best_draft(_SOURCES)
as_draft = _as_draft(_SOURCES)
