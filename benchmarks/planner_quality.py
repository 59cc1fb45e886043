"""How good plans are: predicted iteration over the proved lower bound, on fresh batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.lengths import IntArray, draw_batch
from planner.bound import lower_bound
from planner.cost import CostModel
from planner.iteration import Coupling, iteration_s
from planner.plan import Plan
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
# These look at lengths only, so one plan serves every cost model.
BLIND_TO_COST = ("static", "mcore-v2")
FIRST_SEED = 1_000

Key = tuple[str, str, Coupling]  # planner, cost, coupling


@dataclass(frozen=True, slots=True)
class Setting:
    """The size of a batch and of the pool that plans it."""

    ranks: int
    context: int

    def pool(self, expert_ranks: int = 1) -> PoolShape:
        """The pool planned for."""
        return PoolShape(
            num_ranks=self.ranks,
            token_budget=TOKEN_BUDGETS[self.context],
            stages=STAGES,
            chunks=CHUNKS,
            expert_ranks=expert_ranks,
        )

    def planners(self, turn: int) -> list[str]:
        """Those that plan this turn's batch."""
        return [p for p in PLANNERS if turn < FEWER_BATCHES.get((p, self.ranks), BATCHES)]


def quality_rows() -> Iterator[dict[str, object]]:
    """One row a planner, size, context, cost and coupling."""
    for ranks, context in product(BATCH_TOKENS, TOKEN_BUDGETS):
        setting = Setting(ranks, context)
        ratios: dict[Key, list[float]] = {key: [] for key in product(PLANNERS, COSTS, COUPLINGS)}
        for turn in range(BATCHES):
            for key, ratio in _ratios(setting, turn):
                ratios[key].append(ratio)
        yield from (_row(setting, key, ratios) for key in ratios)


def _row(setting: Setting, key: Key, ratios: dict[Key, list[float]]) -> dict[str, object]:
    planner, cost, coupling = key
    values, papers = ratios[key], ratios["hydra", cost, coupling]
    return {
        "kind": "quality",
        "planner": planner,
        "ranks": setting.ranks,
        "context": setting.context,
        "cost": cost,
        "coupling": coupling,
        "bound_ratio": float(np.mean(values)),
        "worst": max(values),
        "worse_than_hydra": sum(a > b for a, b in zip(values, papers, strict=False)),
        "batches": len(values),
    }


def _ratios(setting: Setting, turn: int) -> Iterator[tuple[Key, float]]:
    """Iteration over bound of every planner, cost and coupling, for one batch."""
    lengths = draw_batch(BATCH_TOKENS[setting.ranks], setting.context, FIRST_SEED + turn)
    names = setting.planners(turn)
    blind = {
        name: get_planner(name).plan(lengths, setting.pool(), preset(COSTS[0]))
        for name in names
        if name in BLIND_TO_COST
    }
    for cost_name in COSTS:
        cost = preset(cost_name)
        bound_s = lower_bound(lengths, setting.pool(), cost)
        for name, coupling in product(names, COUPLINGS):
            plan = blind.get(name) or _plan(name, lengths, setting, cost, coupling)
            yield (name, cost_name, coupling), iteration_s(plan, cost, coupling) / bound_s


def _plan(
    name: str, lengths: IntArray, setting: Setting, cost: CostModel, coupling: Coupling
) -> Plan:
    """The plan for a coupling: hydra-opt knows of the blocks that share experts."""
    expert_ranks = 1 if coupling == "pool" else coupling
    return get_planner(name).plan(lengths, setting.pool(expert_ranks), cost)
