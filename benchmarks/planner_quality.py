"""How good plans are: predicted iteration over the proved lower bound, on fresh batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.lengths import IntArray, draw_batch
from planner.bound import lower_bound
from planner.cost import CostModel
from planner.iteration import Coupling, iteration_s
from planner.pool import PoolShape
from planner.presets import preset
from planner.registry import get_planner

# Tokens of a batch, by number of ranks, as in the paper's runs at these sizes.
BATCH_TOKENS = {128: 4 << 20, 512: 32 << 20, 4096: 256 << 20}
# The token budget, by context.
TOKEN_BUDGETS = {32_768: 4_096, 262_144: 8_192}
COSTS = ("dense", "moe", "mla")
COUPLINGS: tuple[Coupling, ...] = ("pool", 8)
STAGES, CHUNKS = 4, 2

# Batches averaged. Megatron's planner takes a fifth of a second at 512 ranks and 13 at 4096.
BATCHES = 50
FEWER_BATCHES = {("mcore-v2", 4096): 1}
PLANNERS = ("static", "mcore-v2", "hydra", "hydra-opt")
FIRST_SEED = 1_000


@dataclass(frozen=True, slots=True)
class Setting:
    """What a table's row is measured under."""

    ranks: int
    context: int
    cost: str

    def pool(self, expert_ranks: int = 1) -> PoolShape:
        """The pool planned for."""
        return PoolShape(
            num_ranks=self.ranks,
            token_budget=TOKEN_BUDGETS[self.context],
            stages=STAGES,
            chunks=CHUNKS,
            expert_ranks=expert_ranks,
        )

    def batch(self, seed: int) -> IntArray:
        """[N] lengths: the same batch for every planner and cost."""
        return draw_batch(BATCH_TOKENS[self.ranks], self.context, seed)


def quality_rows() -> Iterator[dict[str, object]]:
    """One row a planner, size, context, cost and coupling."""
    for ranks, context, cost in product(BATCH_TOKENS, TOKEN_BUDGETS, COSTS):
        yield from _setting_rows(Setting(ranks, context, cost))


def _setting_rows(setting: Setting) -> Iterator[dict[str, object]]:
    cost = preset(setting.cost)
    ratios: dict[tuple[str, Coupling], list[float]] = {
        key: [] for key in product(PLANNERS, COUPLINGS)
    }
    for turn in range(BATCHES):
        lengths = setting.batch(FIRST_SEED + turn)
        bound_s = lower_bound(lengths, setting.pool(), cost)
        for planner in PLANNERS:
            if turn < FEWER_BATCHES.get((planner, setting.ranks), BATCHES):
                for coupling, time_s in _times_s(planner, lengths, setting, cost).items():
                    ratios[planner, coupling].append(time_s / bound_s)
    for (planner, coupling), values in ratios.items():
        hydra = ratios["hydra", coupling]
        yield {
            "kind": "quality",
            "planner": planner,
            "ranks": setting.ranks,
            "context": setting.context,
            "cost": setting.cost,
            "coupling": coupling,
            "bound_ratio": float(np.mean(values)),
            "worst": max(values),
            "worse_than_hydra": sum(a > b for a, b in zip(values, hydra, strict=False)),
            "batches": len(values),
        }


def _times_s(
    name: str, lengths: IntArray, setting: Setting, cost: CostModel
) -> dict[Coupling, float]:
    """Iteration seconds under each coupling; a planner that knows of blocks plans for them."""
    planner = get_planner(name)
    plan = planner.plan(lengths, setting.pool(), cost)
    times: dict[Coupling, float] = {}
    for coupling in COUPLINGS:
        if coupling != "pool" and name == "hydra-opt":
            plan = planner.plan(lengths, setting.pool(expert_ranks=coupling), cost)
        times[coupling] = iteration_s(plan, cost, coupling)
    return times
