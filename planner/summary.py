"""What a plan comes to, in the numbers a person asks for first."""

from dataclasses import dataclass

import numpy as np

from planner.bound import lower_bound
from planner.cost import CostModel, FloatArray
from planner.iteration import Coupling, iteration_s, rank_loads_s
from planner.plan import Plan, group_tokens
from planner.pool import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """One plan under one cost model. Loads are predicted seconds a rank spends in one MB.

    Args:
        planner: who made the plan.
        num_ranks: G.
        num_sequences: N.
        num_microbatches: MBs every rank runs.
        target: the load that was steered to, in the planner's own unit.
        groups_of_degree: how many groups have each CP degree.
        ranks_of_degree: how many rank slots (rank x MB) each CP degree uses.
        load_max_s: the heaviest rank slot.
        load_mean_s: the mean over all rank slots, idle ones included.
        tokens_max: the most padded tokens on one rank in one MB.
        tokens_padding: padded tokens of all MBs that are not in the batch.
        idle_slots: rank slots without a group.
        iteration_s: predicted seconds of the step.
        bound_s: seconds that no plan of this pool can beat.
    """

    planner: str
    num_ranks: int
    num_sequences: int
    num_microbatches: int
    target: float
    groups_of_degree: dict[int, int]
    ranks_of_degree: dict[int, int]
    load_max_s: float
    load_mean_s: float
    tokens_max: int
    tokens_padding: int
    idle_slots: int
    iteration_s: float
    bound_s: float

    @property
    def bound_ratio(self) -> float:
        """Predicted time over the bound; 1 for an empty plan."""
        return self.iteration_s / self.bound_s if self.bound_s else 1.0

    @property
    def imbalance(self) -> float:
        """Heaviest rank slot over the mean one; 1 is perfect."""
        return self.load_max_s / self.load_mean_s if self.load_mean_s else 1.0


def summarize(plan: Plan, cost: CostModel, coupling: Coupling = "pool") -> PlanSummary:
    """Summarize a plan. O(N log N + MBs x G).

    Args:
        plan: a valid plan.
        cost: prices the loads.
        coupling: which ranks wait for each other, see `iteration`.
    """
    loads = rank_loads_s(plan, cost.table(plan.pool))
    tokens = group_tokens(plan)
    degrees, groups = np.unique(plan.group_size, return_counts=True)
    slots = plan.num_microbatches * plan.pool.num_ranks
    return PlanSummary(
        planner=plan.planner,
        num_ranks=plan.pool.num_ranks,
        num_sequences=plan.num_sequences,
        num_microbatches=plan.num_microbatches,
        target=plan.target_s,
        groups_of_degree=_by_degree(degrees, groups),
        ranks_of_degree=_by_degree(degrees, degrees * groups),
        load_max_s=float(loads.max(initial=0.0)),
        load_mean_s=_mean(loads),
        tokens_max=int(tokens.max(initial=0)),
        tokens_padding=int((tokens * plan.group_size).sum() - plan.lengths.sum()),
        idle_slots=slots - int(plan.group_size.sum()),
        iteration_s=iteration_s(plan, cost, coupling),
        bound_s=lower_bound(plan.lengths, plan.pool, cost),
    )


def _by_degree(degrees: IntArray, counts: IntArray) -> dict[int, int]:
    return {int(degree): int(count) for degree, count in zip(degrees, counts, strict=True)}


def _mean(loads: FloatArray) -> float:
    return float(loads.mean()) if loads.size else 0.0
