"""How long planning takes: ours, the rivals', the installed megatron-core's, and a bare sort."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np

from benchmarks.lengths import TOKENS_A_RANK, IntArray, draw_batch
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.registry import get_planner

CONTEXT = 262_144
TOKEN_BUDGET = 8_192
STAGES = 4
CHUNKS = 2
COLD_START_TIMEOUT_S = 300

# How often each planner plans at each number of ranks; the median is reported. The scans of the
# rivals take seconds, so they get fewer turns, and none where they would take minutes.
REPEATS: dict[str, dict[int, int]] = {
    "hydra": {128: 20, 512: 20, 4096: 20, 10240: 20},
    "hydra-opt": {128: 20, 512: 20, 4096: 20, 10240: 20},
    "static": {128: 20, 512: 20, 4096: 5, 10240: 3},
    "mcore-v2": {128: 3, 512: 3, 4096: 1},
    "megatron-core": {128: 1, 512: 1},
}

COLD_START = """
import time
started = time.perf_counter()
import numpy as np
from planner.pool import PoolShape
from planner.presets import DENSE
from planner.registry import get_planner
pool = PoolShape(num_ranks=128, token_budget=8192, stages=4, chunks=2)
get_planner("{planner}").plan(np.arange(1, 2001), pool, DENSE)
print(time.perf_counter() - started)
"""


def time_rows() -> Iterator[dict[str, object]]:
    """One row a planner and pool: median seconds of a plan, sort included, on one core.

    `plan_s` is by the clock; `cpu_s`, of the same turns, tells whether the machine was busy.
    """
    for planner, repeats in REPEATS.items():
        for num_ranks, turns in repeats.items():
            lengths = draw_batch(TOKENS_A_RANK * num_ranks, CONTEXT, seed=num_ranks)
            plan_s, cpu_s = _medians_s(_plan_call(planner, lengths, num_ranks), turns)
            yield {
                "kind": "time",
                "planner": planner,
                "ranks": num_ranks,
                "sequences": len(lengths),
                "plan_s": plan_s,
                "cpu_s": cpu_s,
                **_sort_times(lengths),
                "turns": turns,
                "context": CONTEXT,
                "token_budget": TOKEN_BUDGET,
            }


def cold_start_rows() -> Iterator[dict[str, object]]:
    """Seconds from a fresh process's first import to its first plan, compiled code on disk."""
    for planner in ("hydra", "hydra-opt"):
        yield {"kind": "cold_start", "planner": planner, "first_plan_s": _cold_start_s(planner)}


def _sort_times(lengths: IntArray) -> dict[str, float]:
    """The floor: a sort of the lengths as packed integers, which any planner must do."""
    packed = (lengths.max() - lengths) << 32 | np.arange(len(lengths))
    sort_s, sort_cpu_s = _medians_s(lambda: np.sort(packed), 20)
    return {"sort_s": sort_s, "sort_cpu_s": sort_cpu_s}


def _plan_call(planner: str, lengths: IntArray, num_ranks: int) -> Callable[[], object]:
    if planner == "megatron-core":
        return _megatron_call(lengths, num_ranks)
    pool = PoolShape(num_ranks=num_ranks, token_budget=TOKEN_BUDGET, stages=STAGES, chunks=CHUNKS)
    chosen = get_planner(planner)
    chosen.plan(lengths[:1000], pool, DENSE)  # compile, or read what was compiled before
    return lambda: chosen.plan(lengths, pool, DENSE)


def _megatron_call(lengths: IntArray, num_ranks: int) -> Callable[[], object]:
    """The installed scheduler as it is. It asks its group for its size and nothing else."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Group:
        def size(self) -> int:
            return num_ranks

    samples = list(enumerate(lengths.tolist()))
    scheduler = BalancedCPScheduler(max_seq_len_per_rank=TOKEN_BUDGET, dp_cp_group=Group())
    return lambda: scheduler.get_groups_and_subsamples(list(samples), None)


def _medians_s(call: Callable[[], object], turns: int) -> tuple[float, float]:
    """Median seconds by the clock and of this thread's CPU."""
    clock, cpu = [], []
    for _ in range(turns):
        started, cpu_started = time.perf_counter(), time.thread_time()
        call()
        clock.append(time.perf_counter() - started)
        cpu.append(time.thread_time() - cpu_started)
    return median(clock), median(cpu)


def _cold_start_s(planner: str) -> float:
    command = [sys.executable, "-c", COLD_START.format(planner=planner)]
    subprocess.run(command, check=True, capture_output=True, timeout=COLD_START_TIMEOUT_S)
    warm = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=COLD_START_TIMEOUT_S
    )
    return float(warm.stdout)
