"""The compiled entry points of hydra-opt: the only kernels that Python calls."""

from collections.abc import Callable

from planner.cost import FloatArray
from planner.opt.compiled import entry_point, sources_digest
from planner.opt.draft import Draft, draft_iteration_s, group_loads, pack
from planner.opt.explore import Brackets, Candidates
from planner.opt.explore import explore as explore_kernel
from planner.opt.grow import grow_into_idle_ranks
from planner.opt.task import Task, with_totals
from planner.pool import IntArray


def _fill_in(sources: str) -> Callable[[Task], Task]:
    @entry_point
    def fill_in(task: Task) -> Task:
        sources  # noqa: B018  (part of the cache key, see compiled.py)
        return with_totals(task)

    return fill_in


def _explore(sources: str) -> Callable[[Task, Brackets, int, FloatArray], Candidates]:
    @entry_point
    def explore(task: Task, brackets: Brackets, bisections: int, targets: FloatArray) -> Candidates:
        sources  # noqa: B018
        return explore_kernel(task, brackets, bisections, targets)

    return explore


def _make_draft(sources: str) -> Callable[[Task, float, int], Draft]:
    @entry_point
    def make_draft(task: Task, target: float, num_microbatches: int) -> Draft:
        sources  # noqa: B018
        return pack(task, target, num_microbatches)

    return make_draft


def _grow(sources: str) -> Callable[[Task, Draft], Draft]:
    @entry_point
    def grow(task: Task, draft: Draft) -> Draft:
        sources  # noqa: B018
        count, microbatch, degree, load, group_of, target_s, _ = draft
        degree, load = degree.copy(), load.copy()
        grow_into_idle_ranks(task, microbatch, degree, load, group_of, count)
        iteration_s = draft_iteration_s(task, microbatch, load, count)
        return Draft(count, microbatch, degree, load, group_of, target_s, iteration_s)

    return grow


def _price(sources: str) -> Callable[[Task, int, IntArray, IntArray, IntArray, float], Draft]:
    @entry_point
    def price(
        task: Task,
        num_microbatches: int,
        microbatch: IntArray,
        degree: IntArray,
        group_of: IntArray,
        target_s: float,
    ) -> Draft:
        sources  # noqa: B018
        load = group_loads(task, degree, group_of)
        iteration_s = draft_iteration_s(task, microbatch, load, num_microbatches)
        return Draft(num_microbatches, microbatch, degree, load, group_of, target_s, iteration_s)

    return price


_SOURCES = sources_digest()
fill_in = _fill_in(_SOURCES)
explore = _explore(_SOURCES)
make_draft = _make_draft(_SOURCES)
grow = _grow(_SOURCES)
price = _price(_SOURCES)
