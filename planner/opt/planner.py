"""The planner "hydra-opt"."""

from dataclasses import dataclass, replace

import numpy as np

from planner.cost import CostModel, CostTable
from planner.exact import solve
from planner.hydra import hydra
from planner.iteration import iteration_s
from planner.layout import lay_out
from planner.lengths import checked_lengths, longest_first
from planner.opt.draft import Draft
from planner.opt.entry import fill_in, grow, make_draft, price
from planner.opt.explore import Candidates
from planner.opt.order import in_order
from planner.opt.search import FEW, find_targets
from planner.opt.task import Task, make_task
from planner.packing import Packing
from planner.plan import Plan, empty_plan
from planner.pool import IntArray, PoolShape

# So few sequences are searched through to the end, or for so many branches a MB count.
TINY, MOST_NODES = 10, 20_000
# A plan replaces another if its time is lower by more than rounding.
WORTH_IT = 1 - 1e-9
# So many plans are compared, and more where sequences are few: estimates take them for a fluid.
# A plan this near to the next one's estimate is not worth another.
MOST_PLANS, MOST_PLANS_OF_FEW, NEAR = 3, 32, 1 - 5e-4


@dataclass(frozen=True, slots=True)
class HydraOptPlanner:
    """Searches targets and MB counts under the iteration-time model, in calibrated seconds.

    Never worse than "hydra" under `iteration_s`: the paper's plan is one of those compared.
    """

    name: str = "hydra-opt"

    def plan(self, lengths: IntArray, pool: PoolShape, cost: CostModel) -> Plan:
        """Plan one step; see `interface.Planner`. O(N log G): 20 ms for 150,000 sequences."""
        lengths = checked_lengths(lengths, pool)
        if lengths.size == 0:
            return empty_plan(self.name, pool)
        places = longest_first(lengths)
        ordered = lengths[places]
        table = cost.table(pool)
        task = fill_in(make_task(ordered, pool, table))
        paper, target = hydra().packed(ordered, pool, cost)
        best = best_draft(priced(paper, target, task), task, table)
        if len(ordered) <= TINY:
            best = searched_draft(best, task, pool, table)
        packing = paper if best.group_of is paper.sequence_group else in_order(best)
        plan = lay_out(self.name, packing, places, lengths, pool, table, best.target_s)
        return plan if pool.expert_ranks == 1 else self.better_in_blocks(plan, cost)

    def better_in_blocks(self, plan: Plan, cost: CostModel) -> Plan:
        """The plan, or the paper's if ranks coupled only in blocks finish that one sooner."""
        paper = replace(hydra().plan(plan.lengths, plan.pool, cost), planner=self.name)
        block = plan.pool.expert_ranks
        return min(plan, paper, key=lambda either: iteration_s(either, cost, block))


def best_draft(best: Draft, task: Task, table: CostTable) -> Draft:
    """The best plan of the most promising targets, if it is better than `best`.

    Where tokens are so tight that whole sequences fill none of the plans, with more MBs.
    """
    found = find_targets(task, table)
    best, plans = best_of(found, best, task)
    if plans == 0:
        roomier = found._replace(num_microbatches=found.num_microbatches + task.step)
        best, _ = best_of(roomier, best, task)
    return best


def best_of(found: Candidates, best: Draft, task: Task) -> tuple[Draft, int]:
    """The best of `best` and the first plans of the candidates; and how many plans there were.

    Candidates come by rising estimate, and a plan hardly ever beats its estimate: once the best
    plan is about as low as the next estimate, it stays the best.
    """
    few, plans = len(task.lengths) <= FEW, 0
    most_plans = MOST_PLANS_OF_FEW if few else MOST_PLANS
    near = 1.0 if few else NEAR
    for target, count, estimate_s in zip(*found, strict=True):
        if plans == most_plans or estimate_s >= near * best.iteration_s:
            break
        draft = make_draft(task, target, count)
        if draft.iteration_s < np.inf:
            draft = grown(task, draft)
            plans += 1
        if draft.iteration_s < best.iteration_s * WORTH_IT:
            best = draft
    return best, plans


def grown(task: Task, draft: Draft) -> Draft:
    """The draft with idle ranks put to use where that helps."""
    ranks = task.degrees[draft.degree].sum()
    return draft if ranks == task.num_ranks * draft.num_microbatches else grow(task, draft)


def priced(packing: Packing, target: float, task: Task) -> Draft:
    """The groups of another planner as a draft."""
    draft = price(
        task,
        packing.num_microbatches,
        packing.group_microbatch,
        packing.group_class,
        packing.sequence_group,
        target,
    )
    return draft._replace(group_of=packing.sequence_group)


def searched_draft(best: Draft, task: Task, pool: PoolShape, table: CostTable) -> Draft:
    """The optimum of a tiny batch, or what a bounded search for it finds, if better than `best`."""
    found = solve(task.lengths, pool, table, best.iteration_s * WORTH_IT, MOST_NODES)
    if found.num_microbatches == 0:
        return best
    columns = (found.microbatch, found.degree, found.group_of)
    # Growing also undoes what the search cut finer than its microbatch's height asks for.
    return grow(task, price(task, found.num_microbatches, *columns, best.target_s))
