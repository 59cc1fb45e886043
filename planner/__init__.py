"""Planning: sequence lengths in, plans out. Pure: numpy, numba and the standard library.

What a notebook needs is here: `from planner import PoolShape, get_planner, preset, summarize`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.bound import lower_bound
    from planner.cost import CostModel
    from planner.plan import Plan
    from planner.pool import PoolShape
    from planner.presets import preset
    from planner.registry import get_planner, planner_names
    from planner.summary import summarize

# Found on first use: most of the project imports a type or an error from here and no compiler.
# No name here is a module's too (validate, fit): importing the module would replace it.
_HOMES = {
    "CostModel": "planner.cost",
    "Plan": "planner.plan",
    "PoolShape": "planner.pool",
    "get_planner": "planner.registry",
    "lower_bound": "planner.bound",
    "planner_names": "planner.registry",
    "preset": "planner.presets",
    "summarize": "planner.summary",
}

__all__ = [
    "CostModel",
    "Plan",
    "PoolShape",
    "get_planner",
    "lower_bound",
    "planner_names",
    "preset",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
