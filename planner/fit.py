"""Coefficients of the cost model from measured microbatches."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from planner.cost import CostModel, FloatArray
from planner.errors import InputError
from planner.plan import Plan, group_tokens


def group_features(plan: Plan) -> tuple[FloatArray, FloatArray]:
    """[K] squared tokens over degree, and [K] padded tokens over degree, of each group. O(N).

    They are what `fit` explains a rank's seconds by: look a rank's group up with
    `plan.group_of_rank` and pair it with the seconds that rank measured.
    """
    group_of_member = np.repeat(np.arange(plan.num_groups), np.diff(plan.group_offsets))
    squares = np.square(plan.lengths[plan.members], dtype=np.float64)
    work = np.bincount(group_of_member, weights=squares, minlength=plan.num_groups)
    return work / plan.group_size, group_tokens(plan).astype(np.float64)


def fit(
    base: CostModel, squares: npt.ArrayLike, tokens: npt.ArrayLike, seconds: npt.ArrayLike
) -> CostModel:
    """A cost model whose quadratic, linear and fixed costs explain measurements best.

    Minimises the relative error of quadratic * squares + linear * tokens + fixed, with no cost
    below zero: of all choices of costs held at zero, the feasible one with the least error.
    Communication keeps the base model's coefficients; measure with it hidden, or at degree 1.

    Args:
        base: gives everything that is not fitted.
        squares: [n] squared tokens over degree on the measured rank, a microbatch each.
        tokens: [n] padded tokens on it.
        seconds: [n] measured, forward plus backward of one pipeline stage.

    Raises:
        InputError: under three measurements, unequal numbers of them, or one not above zero.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in (squares, tokens, seconds)]
    _check(columns)
    measured = columns[2]
    features = np.stack([columns[0], columns[1], np.ones_like(measured)], axis=1)
    costs = _least_relative_squares(features / measured[:, None])
    return replace(
        base, quadratic_s=float(costs[0]), linear_s=float(costs[1]), fixed_s=float(costs[2])
    )


def _least_relative_squares(features: FloatArray) -> FloatArray:
    """[3] costs >= 0 that bring features [n, 3] @ costs nearest to 1."""
    scale = features.max(axis=0)
    best, least = np.zeros(3), np.inf
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            kept = list(chosen)
            ones = np.ones(len(features))
            found = np.linalg.lstsq(features[:, kept] / scale[kept], ones, rcond=None)[0]
            costs = np.zeros(3)
            costs[kept] = found / scale[kept]
            error = float(np.square(features @ costs - 1).sum())
            if found.min() >= 0 and error < least:
                best, least = costs, error
    return best


def _check(columns: list[FloatArray]) -> None:
    sizes = {column.size for column in columns}
    if len(sizes) > 1 or min(sizes) < 3:
        raise InputError(
            "A fit needs as many squares and tokens as seconds",
            value=[column.size for column in columns],
            limit="at least 3 of each",
        )
    if not all(np.isfinite(column).all() and (column > 0).all() for column in columns):
        raise InputError("A measurement is not a finite number above zero")
