"""Megatron's dynamic context parallelism, second version: the planner HyDra is measured against.

Written from its description (megatron-lm's dev branch, `next_hdp_group`, pull request 2000) for
this project's interface; the differences are that padding is to the sequence's own degree and
that degrees are those of the pool. Memory alone sizes a sequence's CP degree; each sequence
scans the groups of the microbatch, which is what its planning time comes from.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.cost import CostModel
from planner.layout import lay_out
from planner.lengths import checked_lengths, longest_first
from planner.packing import Packing
from planner.plan import Plan, empty_plan
from planner.pool import IntArray, PoolShape

BUCKET_SLACK = 1.1
BALANCED_WITHIN = 0.05

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Batch:
    """N sequences, longest first: the least degree that holds each, its share and its work."""

    degree: IntArray
    tokens: IntArray
    work: FloatArray


@dataclass(slots=True)
class _Microbatch:
    """Open groups in order of opening; `num_groups` entries of the arrays are in use."""

    size: IntArray
    load: FloatArray
    tokens: IntArray
    members: list[list[int]]
    free: int

    @property
    def num_groups(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class McoreV2Planner:
    """Sizes groups by memory, fills work-equal buckets in turn, stops a microbatch when level."""

    name: str = "mcore-v2"

    def plan(self, lengths: IntArray, pool: PoolShape, cost: CostModel) -> Plan:
        """Plan one step. O(N G) scans; see `interface.Planner`."""
        lengths = checked_lengths(lengths, pool)
        if lengths.size == 0:
            return empty_plan(self.name, pool)
        places = longest_first(lengths)
        batch = _measure(lengths[places], pool)
        waiting = np.arange(len(places), dtype=np.int64)
        microbatches: list[_Microbatch] = []
        while waiting.size:
            microbatch, waiting = _build_microbatch(waiting, batch, pool)
            microbatches.append(microbatch)
        _halve_tails(microbatches, pool)
        num_microbatches = pool.legal_num_microbatches(len(microbatches))
        for microbatch in microbatches:
            _fill_idle_ranks(microbatch, pool)
        packing = _packing(microbatches, num_microbatches, len(places), pool)
        mean = float(batch.work @ batch.degree) / (pool.num_ranks * num_microbatches)
        return lay_out(self.name, packing, places, lengths, pool, cost.table(pool), mean)


def _measure(lengths: IntArray, pool: PoolShape) -> _Batch:
    """Size every sequence by memory: the least degree whose padded share keeps the budget."""
    degrees = np.array(pool.degrees, dtype=np.int64)
    longest_held = pool.token_budget // pool.pad_unit * pool.pad_unit * degrees
    degree = degrees[np.searchsorted(longest_held, lengths)]
    tokens = -(-lengths // (pool.pad_unit * degree)) * pool.pad_unit
    return _Batch(degree, tokens, np.square(lengths, dtype=np.float64) / degree)


def _buckets(work: FloatArray, count: int) -> list[list[int]]:
    """Cut sequences into `count` runs [next, end) of about equal work.

    A run closes before it exceeds 1.1 times its share, or when the sequences left are as many as
    the runs left.
    """
    total = np.cumsum(work)
    share = BUCKET_SLACK * float(total[-1]) / count
    runs, start = [], 0
    for left in range(count - 1, -1, -1):
        done = float(total[start - 1]) if start else 0.0
        end = int(np.searchsorted(total, done + share, side="right"))
        end = len(work) if left == 0 else min(max(end, start + 1), len(work) - left)
        runs.append([start, end])
        start = end
    return runs


def _build_microbatch(
    waiting: IntArray, batch: _Batch, pool: PoolShape
) -> tuple[_Microbatch, IntArray]:
    """Fill one microbatch; return it and the sequences that must wait."""
    degree = batch.degree[waiting]
    runs = _buckets(batch.work[waiting], len(np.unique(degree)))
    most = min(pool.num_ranks, len(waiting))
    size = np.zeros(most, dtype=np.int64)
    microbatch = _Microbatch(size, np.zeros(most), np.zeros_like(size), [], pool.num_ranks)
    while True:
        run = next((r for r in runs if r[0] < r[1] and _has_place(microbatch, degree[r[0]])), None)
        if run is None:
            break
        sequence = int(waiting[run[0]])
        if not _place(microbatch, sequence, batch, pool):
            break
        run[0] += 1
        if degree[run[0] - 1] < degree[0] and _is_level(microbatch):
            break
    left = [waiting[start:end] for start, end in runs]
    return microbatch, np.concatenate(left)


def _has_place(microbatch: _Microbatch, degree: int) -> bool:
    """Whether a group of exactly this size is open, or enough ranks are free for one."""
    same_size = microbatch.size[: microbatch.num_groups] == degree
    return microbatch.free >= degree or bool(same_size.any())


def _place(microbatch: _Microbatch, sequence: int, batch: _Batch, pool: PoolShape) -> bool:
    """Open a group while ranks are free, else join the lightest of that size with room."""
    degree, tokens = int(batch.degree[sequence]), batch.tokens[sequence]
    if microbatch.free >= degree:
        group = microbatch.num_groups
        microbatch.members.append([])
        microbatch.size[group] = degree
        microbatch.free -= degree
    else:
        used = slice(0, microbatch.num_groups)
        has_room = microbatch.tokens[used] + tokens <= pool.token_budget
        allowed = (microbatch.size[used] == degree) & has_room
        if not allowed.any():
            return False
        group = int(np.where(allowed, microbatch.load[used], np.inf).argmin())
    microbatch.members[group].append(sequence)
    microbatch.load[group] += batch.work[sequence]
    microbatch.tokens[group] += tokens
    return True


def _is_level(microbatch: _Microbatch) -> bool:
    """Whether all ranks, none idle, are within 5% of the heaviest."""
    loads = microbatch.load[: microbatch.num_groups]
    heaviest = loads.max()
    return microbatch.free == 0 and bool(heaviest - loads.min() <= BALANCED_WITHIN * heaviest)


def _halve_tails(microbatches: list[_Microbatch], pool: PoolShape) -> None:
    """Halve microbatches by ranks, from the last one back, until their number is legal."""
    missing = pool.legal_num_microbatches(len(microbatches)) - len(microbatches)
    at = len(microbatches) - 1
    while missing and at >= 0:
        if microbatches[at].num_groups < 2:
            at -= 1
            continue
        microbatches[at : at + 1] = _halve(microbatches[at], pool)
        missing -= 1
        at += 1


def _halve(microbatch: _Microbatch, pool: PoolShape) -> list[_Microbatch]:
    ends = np.cumsum(microbatch.size[: microbatch.num_groups])
    cut = int(np.searchsorted(ends, ends[-1] / 2)) + 1
    cut = min(cut, microbatch.num_groups - 1)
    halves = []
    for part in (slice(0, cut), slice(cut, microbatch.num_groups)):
        size = microbatch.size[part].copy()
        load, tokens = microbatch.load[part].copy(), microbatch.tokens[part].copy()
        free = pool.num_ranks - int(size.sum())
        halves.append(_Microbatch(size, load, tokens, microbatch.members[part], free))
    return halves


def _fill_idle_ranks(microbatch: _Microbatch, pool: PoolShape) -> None:
    """Double the first of the smallest groups while ranks are idle, however thin that cuts."""
    following = dict(zip(pool.degrees, pool.degrees[1:], strict=False))
    while microbatch.free and microbatch.num_groups:
        sizes = microbatch.size[: microbatch.num_groups]
        group = int(sizes.argmin())
        wider = following.get(int(sizes[group]))
        if wider is None or wider - sizes[group] > microbatch.free:
            return
        microbatch.free -= int(wider - sizes[group])
        sizes[group] = wider


def _packing(
    microbatches: list[_Microbatch], num_microbatches: int, num_sequences: int, pool: PoolShape
) -> Packing:
    sequence_group = np.zeros(num_sequences, dtype=np.int64)
    group_microbatch: list[int] = []
    for at, microbatch in enumerate(microbatches):
        for members in microbatch.members:
            sequence_group[members] = len(group_microbatch)
            group_microbatch.append(at)
    sizes = np.concatenate([mb.size[: mb.num_groups] for mb in microbatches])
    none = np.zeros(0, dtype=np.int64)
    return Packing(
        num_microbatches=num_microbatches,
        group_microbatch=np.array(group_microbatch, dtype=np.int64),
        group_class=np.searchsorted(pool.degrees, sizes).astype(np.int64),
        group_work=none,
        group_shortest=none,
        sequence_group=sequence_group,
    )
