"""Planners by name."""

import difflib
from collections.abc import Callable

from planner.errors import InputError
from planner.hydra import hydra
from planner.interface import Planner
from planner.mcore_v2 import McoreV2Planner
from planner.opt.planner import HydraOptPlanner
from planner.static import StaticPlanner

PLANNERS: dict[str, Callable[[], Planner]] = {
    "hydra": hydra,
    "hydra-opt": HydraOptPlanner,
    "static": StaticPlanner,
    "mcore-v2": McoreV2Planner,
}


def planner_names() -> tuple[str, ...]:
    """Names that `get_planner` knows."""
    return tuple(PLANNERS)


def get_planner(name: str) -> Planner:
    """The planner of that name.

    Raises:
        InputError: no such planner; the nearest name is suggested.
    """
    if name in PLANNERS:
        return PLANNERS[name]()
    near = difflib.get_close_matches(name, PLANNERS, n=1)
    raise InputError(
        "Unknown planner",
        value=name,
        limit=", ".join(PLANNERS),
        remedy=f"Did you mean {near[0]}?" if near else "",
    )
