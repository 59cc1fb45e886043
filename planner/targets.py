"""The paper's closed-form targets (section 5.1.1), reconstructed: docs/adr/0004 has the argument.

Replace `closed_form_targets` to try another formula: nothing else knows it.
"""

import math
from dataclasses import dataclass

import numpy as np

from planner.cost import CostModel
from planner.pool import IntArray, PoolShape

# Below this many tokens a rank, attention kernels and projections run at a fraction of their
# speed, so a finer cut gains nothing.
SMALLEST_SHARD_TOKENS = 128
# The wanted cap is an estimate: one that lacks less than a tenth of a legal degree takes it.
NEAR_MISS = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What packing steers to.

    Args:
        cap: C, the CP degree of the longest sequence.
        load: the target, in squared tokens a rank and microbatch.
        num_microbatches: MBs expected if packing were perfect; packing decides the real count.
    """

    cap: int
    load: float
    num_microbatches: int


def closed_form_targets(lengths: IntArray, pool: PoolShape, cost: CostModel) -> Targets:
    """Choose the load target and the CP cap. O(N), from five sums.

    With S the longest length, W the sum of squares, G ranks, p stages of v chunks, a seconds per
    squared token, t0 seconds per MB, an iteration at target L takes about

        T(L) = (a L + t0) (M + (p - 1) / v),    M = max(W / (G L), M0)

    where M0 is the least MB count that holds the tokens. While W / (G L) > M0 this is convex
    with its minimum at L* = sqrt(t0 v W / (a G (p - 1))): the bubble grows with L, the
    per-MB cost with 1 / L. Above W / (G M0) a higher target saves no MB. So the wanted target is
    the lesser of the two, the cap is S^2 / L rounded down to a legal degree, and the target is
    the lowest that the longest sequence can meet at that cap, S^2 / C. Down, because real MB
    counts grow faster with C than the model's: degrees are rounded up, and MBs full of attention
    are not full of tokens. Only when even the least degree that holds S leaves it under the
    wanted load is the target higher than that: a batch of short sequences must fill its ranks.

    Args:
        lengths: [N] lengths that fit the pool, N >= 1.
        pool: the pool.
        cost: gives a and t0.
    """
    longest = int(lengths.max())
    square = float(longest) ** 2
    # Not a dot product: BLAS splits it by threads, and plans must not depend on their number.
    work = float(np.square(lengths, dtype=np.float64).sum())
    fewest = pool.legal_num_microbatches(
        math.ceil(int(lengths.sum()) / (pool.num_ranks * pool.token_budget))
    )
    wanted = min(_balanced_load(work, pool, cost), work / (pool.num_ranks * fewest))
    usable = _usable_degrees(longest, pool)
    if square / usable[0] <= wanted:
        return _targets(usable[0], wanted, work, fewest, pool)
    cap = max(k for k in usable if k == usable[0] or k * wanted <= NEAR_MISS * square)
    return _targets(cap, square / cap, work, fewest, pool)


def _usable_degrees(longest: int, pool: PoolShape) -> list[int]:
    """Degrees that hold the longest sequence and, but for the least, do not cut it too thin.

    Shorter sequences come out no thinner: at one target their shards are S^2 / (C s) long.
    """
    holds = [k for k in pool.degrees if pool.padded(longest, k) <= pool.token_budget * k]
    return holds[:1] + [k for k in holds[1:] if k * SMALLEST_SHARD_TOKENS <= longest]


def _balanced_load(work: float, pool: PoolShape, cost: CostModel) -> float:
    """L*: where the falling bubble and the rising per-MB cost meet; no pipeline has no bubble."""
    if pool.stages == 1 or cost.quadratic_s == 0:
        return math.inf
    bubbles = (pool.stages - 1) / pool.chunks
    return math.sqrt(cost.fixed_s * work / (cost.quadratic_s * pool.num_ranks * bubbles))


def _targets(cap: int, load: float, work: float, fewest: int, pool: PoolShape) -> Targets:
    expected = pool.legal_num_microbatches(math.ceil(work / (pool.num_ranks * load)))
    return Targets(cap=cap, load=load, num_microbatches=max(fewest, expected))
