"""Whole training steps under the plans of several planners: same engine, batches and run.

On 2 ranks the clock is read as it is. A pool of 8 ranks does not fit a small machine's cores, so
there every rank's CPU seconds are measured in each microbatch, and the makespan is COMPUTED from
them: the sum over microbatches of the slowest rank's, as a barrier after each would make it (EP
and pipelines have one).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.lengths import IntArray, document_lengths
from planner.cost import CostModel
from planner.factorize import AttentionShape
from planner.fit import fit, group_features
from planner.iteration import rank_loads_s
from planner.plan import Plan
from planner.pool import PoolShape
from planner.registry import get_planner
from tests.workers.pool import command_of, membership_of, payload_of, run_pool
from workers.protocol import ModelSpec, StepResult, TrainingSpec
from workers.runtime import WorkerRuntime

PLANNERS = ("static", "mcore-v2", "hydra", "hydra-opt")
TIMEOUT_S = 900.0

MODEL = ModelSpec(
    num_layers=2,
    hidden_size=128,
    ffn_hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    vocab_size=258,
    context=8_192,
)
TRAINING = TrainingSpec(seed=1, optimizer="sgd", lr=1e-3)
# A first guess of this model on one core; `fit` replaces it by what the run measures.
GUESS = CostModel(
    quadratic_s=1e-7,
    linear_s=2e-4,
    fixed_s=1e-2,
    attention=AttentionShape(num_heads=8, num_kv_heads=2, qk_dim=16, v_dim=16, bytes_per_element=4),
    num_layers=2,
    exposed_alltoall=0.0,
)


@dataclass(frozen=True)
class Setting:
    """A pool, and the batches it trains."""

    pool: PoolShape
    batch_tokens: int
    seeds: tuple[int, ...]

    def batches(self) -> list[IntArray]:
        """Real documents up to the context and one that fills it, a batch for each seed."""
        fitting = document_lengths()[document_lengths() <= MODEL.context]
        shuffled = (np.random.default_rng(seed).permutation(fitting) for seed in self.seeds)
        counts = ((np.cumsum(documents) < self.batch_tokens, documents) for documents in shuffled)
        return [np.append(documents[is_taken], MODEL.context) for is_taken, documents in counts]


TWO_RANKS = Setting(PoolShape(num_ranks=2, token_budget=4_096), 24_576, (1, 2))
_EIGHT = PoolShape(num_ranks=8, token_budget=2_048)  # the whole context needs degree 4
EIGHT_RANKS = (
    Setting(_EIGHT, 16_384, (1, 2, 3, 4, 5, 6)),
    Setting(_EIGHT, 32_768, (1, 2, 3)),
)


def step_rows() -> Iterator[dict[str, object]]:
    """Rows of the figures of whole steps."""
    yield from clock_rows()
    for setting in EIGHT_RANKS:
        yield from makespan_rows(setting)


def clock_rows() -> Iterator[dict[str, object]]:
    """Tokens a second by the clock on 2 ranks, one row a planner."""
    for planner, plans in planned(TWO_RANKS, PLANNERS, GUESS).items():
        ranks = run_pool(2, train, [warm_up(TWO_RANKS.pool), *plans], timeout_s=TIMEOUT_S)
        step_s = sum(max(rank[i].step_s for rank in ranks) for i in range(1, len(plans) + 1))
        tokens = sum(int(plan.lengths.sum()) for plan in plans)
        yield {
            "figure": "two_rank_tokens_per_s",
            "value": tokens / step_s,
            "planner": planner,
            "tokens": tokens,
            "step_s": step_s,
        }


def makespan_rows(setting: Setting) -> Iterator[dict[str, object]]:
    """Computed makespans on 8 ranks, their ratios, and how well the fitted costs predict loads.

    The costs are fitted to a first run, and the runs they are held to are others.
    """
    first = Measured.of("hydra", planned(setting, ("hydra",), GUESS)["hydra"])
    fitted = first.fitted()
    runs = {
        planner: Measured.of(planner, plans)
        for planner, plans in planned(setting, PLANNERS, fitted).items()
    }
    batch = {"batch_tokens": setting.batch_tokens + MODEL.context, "batches": len(setting.seeds)}
    for rival in ("static", "mcore-v2"):
        for ours in ("hydra", "hydra-opt"):
            yield {
                "figure": f"{ours}_over_{rival}_makespan".replace("-", "_"),
                "value": runs[rival].makespan_s / runs[ours].makespan_s,
                **batch,
            }
    for planner, run in runs.items():
        yield {
            "figure": "load_prediction_error",
            "value": run.prediction_error(fitted),
            "planner": planner,
            **batch,
        }
    for run in runs.values():
        yield run.row() | batch
    fitted_s = {name: getattr(fitted, name) for name in ("quadratic_s", "linear_s", "fixed_s")}
    yield {"figure": "fitted_costs", "value": None, **fitted_s, **batch}


def planned(setting: Setting, planners: tuple[str, ...], cost: CostModel) -> dict[str, list[Plan]]:
    """Each planner's plans of the setting's batches."""
    return {
        name: [get_planner(name).plan(batch, setting.pool, cost) for batch in setting.batches()]
        for name in planners
    }


def warm_up(pool: PoolShape) -> Plan:
    """A first step that pays for what happens only once: caches, memory, lazy imports."""
    lengths = np.full(pool.num_ranks, 64)
    return get_planner("static").plan(lengths, pool, GUESS)


def train(rank: int, world_size: int, port: int, plans: list[Plan]) -> list[StepResult]:
    """One worker: a step for each plan."""
    runtime = WorkerRuntime(MODEL, TRAINING)
    runtime.load()
    membership = membership_of(rank, world_size, port, TRAINING, timeout_s=TIMEOUT_S)
    runtime.join(membership, plans[-1].pool)
    results = []
    for step, plan in enumerate(plans, start=1):
        payload = payload_of(plan, vocab_size=MODEL.vocab_size)
        results.append(runtime.run_step(command_of(plan, step), payload))
    runtime.leave()
    return results


@dataclass(frozen=True)
class Measured:
    """A planner's steps on the pool of 8."""

    planner: str
    plans: list[Plan]
    cpu_s: list[np.ndarray]  # a plan each: [MBs, ranks]
    wall_s: float

    @classmethod
    def of(cls, planner: str, plans: list[Plan]) -> "Measured":
        """Train every plan once, after a warm-up."""
        pool = plans[0].pool
        started = time.perf_counter()
        ranks = run_pool(pool.num_ranks, train, [warm_up(pool), *plans], timeout_s=TIMEOUT_S)
        cpu_s = [
            np.array([[mb.cpu_s for mb in rank[i].microbatches] for rank in ranks]).T
            for i in range(1, len(plans) + 1)
        ]
        return cls(planner, plans, cpu_s, time.perf_counter() - started)

    @property
    def makespan_s(self) -> float:
        """Sum over microbatches of the slowest rank's CPU seconds."""
        return float(sum(seconds.max(axis=1).sum() for seconds in self.cpu_s))

    def row(self) -> dict[str, object]:
        """What was measured, and how even it was."""
        return {
            "figure": "computed_makespan",
            "value": self.makespan_s,
            "unit": "s",
            "planner": self.planner,
            "ranks": self.plans[0].pool.num_ranks,
            "microbatches": [plan.num_microbatches for plan in self.plans],
            "degrees": sorted({int(size) for plan in self.plans for size in plan.group_size}),
            "busy_share": self._busy_s / (self.makespan_s * self.plans[0].pool.num_ranks),
            "wall_s": self.wall_s,
        }

    @property
    def _busy_s(self) -> float:
        return float(sum(seconds.sum() for seconds in self.cpu_s))

    def fitted(self) -> CostModel:
        """The cost model that explains these steps best."""
        features = [self._features(i) for i in range(len(self.plans))]
        squares, tokens, seconds = (
            np.concatenate(column) for column in zip(*features, strict=True)
        )
        return fit(GUESS, squares, tokens, seconds)

    def _features(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Squared tokens over degree, padded tokens, and seconds of every busy rank and MB."""
        plan, seconds = self.plans[index], self.cpu_s[index]
        squares, tokens = group_features(plan)
        busy = [
            (group, seconds[microbatch, rank])
            for microbatch in range(plan.num_microbatches)
            for rank in range(plan.pool.num_ranks)
            if (group := plan.group_of_rank(microbatch, rank)) is not None
        ]
        groups = np.array([group for group, _ in busy])
        return squares[groups], tokens[groups], np.array([taken for _, taken in busy])

    def prediction_error(self, cost: CostModel) -> float:
        """Mean difference of predicted and measured load of a rank in a step, over the mean load.

        A rank's load is its seconds over all microbatches of the step, fixed costs included.
        """
        differences, loads = [], []
        for plan, seconds in zip(self.plans, self.cpu_s, strict=True):
            table = cost.table(plan.pool)
            predicted = (rank_loads_s(plan, table) + table.fixed_s).sum(axis=0)
            differences.append(np.abs(predicted - seconds.sum(axis=0)))
            loads.append(seconds.sum(axis=0))
        return float(np.concatenate(differences).mean() / np.concatenate(loads).mean())
