"""A proved lower bound on the iteration time of any plan."""

import numpy as np

from planner.cost import CostModel, CostTable, FloatArray
from planner.errors import InfeasibleError
from planner.iteration import bubble_weight
from planner.pool import IntArray, PoolShape


def lower_bound(lengths: IntArray, pool: PoolShape, cost: CostModel) -> float:
    """The least seconds an iteration of these sequences can take, whoever plans it.

    It bounds `iteration_s` over all plans that use the pool's degrees, whole pool or blocks.

    Proof. c(s, k) is the load of sequence s on each rank of a group of k. Let H be the heaviest
    load of any rank in any microbatch. Then s has a degree with c(s, k) <= H that fits the
    budget, so it uses at least

        w_H(s) = min { k c(s, k) : c(s, k) <= H, pad(s, k) / k <= B }    rank-seconds

    and all of them W(H) = sum of w_H(s). The heaviest load of a microbatch is no less than the
    mean over its ranks, so the heights t_m add up to at least W(H) / G; one of them is H. (With
    blocks, the mean over blocks of their summed heights is no less than W(H) / G either, and the
    block that holds H has summed at least H.) max t_m is H, and no less than the mean height
    W(H) / (G M). Hence

        iteration >= max(W(H) / G, H) + M t0 + (p-1)/v (t0 + max(H, W(H) / (G M)))

    for the plan's own M and H. M is a legal count with M G B no less than the padded tokens. So
    the least right-hand side over all M and H is a bound. W is a falling staircase with a step
    at each c(s, k) and the rest grows with H, so the least lies on a step: all are tried. For
    one H the right-hand side is convex in M: only the legal counts next to its real minimum are
    tried. O(D U log(D U)) for U distinct lengths and D degrees.

    Raises:
        InfeasibleError: a sequence fits the pool at no degree.
    """
    if len(lengths) == 0:
        return 0.0
    table = cost.table(pool)
    distinct, count = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
    seconds, padded = _per_degree(distinct, pool, table)
    fewest = _fewest_microbatches(distinct, count, padded, pool)
    heights, work = _work_staircase(seconds, count, table)
    mean = work / pool.num_ranks
    bubble = bubble_weight(pool)
    num_microbatches = _best_counts(heights, mean, fewest, pool, table.fixed_s)
    total = np.maximum(mean, heights) + bubble * np.maximum(heights, mean / num_microbatches)
    return float((total + (num_microbatches + bubble) * table.fixed_s).min())


def _per_degree(
    distinct: IntArray, pool: PoolShape, table: CostTable
) -> tuple[FloatArray, FloatArray]:
    """[U, D] c(s, k) and padded tokens, infinite where a rank would exceed its budget."""
    unit = table.degrees * pool.pad_unit
    padded = -(-distinct[:, None] // unit) * unit
    seconds = table.sequence_s(distinct[:, None], np.arange(len(table.degrees))[None, :])
    fits = padded <= pool.token_budget * table.degrees
    return np.where(fits, seconds, np.inf), np.where(fits, padded, np.inf)


def _fewest_microbatches(
    distinct: IntArray, count: IntArray, padded: FloatArray, pool: PoolShape
) -> int:
    least = padded.min(axis=1)
    if not np.isfinite(least).all():
        raise InfeasibleError(
            "A sequence does not fit the pool",
            value=f"{int(distinct[~np.isfinite(least)].max())} tokens",
            limit=f"{pool.longest_sequence} tokens",
            remedy="Raise token_budget or the number of ranks, or clip the sequence.",
        )
    tokens = int((least.astype(np.int64) * count).sum())
    return pool.legal_num_microbatches(-(-tokens // (pool.num_ranks * pool.token_budget)))


def _work_staircase(
    seconds: FloatArray, count: IntArray, table: CostTable
) -> tuple[FloatArray, FloatArray]:
    """The steps of W: heights H (ascending) and W(H) from each on, where every sequence fits."""
    by_height = np.argsort(seconds, axis=1, kind="stable")
    heights = np.take_along_axis(seconds, by_height, axis=1)
    with np.errstate(invalid="ignore"):
        least = np.minimum.accumulate(heights * table.degrees[by_height], axis=1)
        drops = np.diff(least, axis=1)
    lowest = float(heights[:, 0].max())
    # A sequence has entered by its least height, all of them by `lowest`; later steps only save.
    step_at = np.maximum(heights[:, 1:], lowest)
    useful = np.isfinite(step_at) & (drops < 0)
    at = np.concatenate(([lowest], step_at[useful]))
    change = np.concatenate(([float(least[:, 0] @ count)], (drops * count[:, None])[useful]))
    order = np.argsort(at, kind="stable")
    # The first entry sorts first among equals; its partial sums at the same height are only
    # too large, and the last of them is right and smaller.
    return at[order], np.cumsum(change[order])


def _best_counts(
    heights: FloatArray, mean: FloatArray, fewest: int, pool: PoolShape, fixed_s: float
) -> FloatArray:
    """[2, steps] the legal MB counts on either side of each step's real minimum."""
    unit = pool.legal_num_microbatches(1)
    flat_from = mean / heights
    least = np.sqrt(bubble_weight(pool) * mean / fixed_s) if fixed_s > 0 else flat_from
    below = np.floor(np.minimum(flat_from, least) / unit) * unit
    counts: FloatArray = np.maximum(np.stack((below, below + unit)), fewest)
    return counts
