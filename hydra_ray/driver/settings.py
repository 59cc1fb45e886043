"""What the recipe sets for the training loop, in the loop's own terms."""

from collections.abc import Callable
from dataclasses import dataclass

from hydra_ray.driver.decisions import Limits
from hydra_ray.driver.placement import UnitShape
from planner.cost import CostModel
from planner.pool import PoolShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits of the loop's calls, in seconds."""

    step_s: float = 1800.0
    form_s: float = 120.0
    save_s: float = 1800.0
    grow_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the recipe sets for the loop; `pool_of` gives the pool of a number of units."""

    num_steps: int
    limits: Limits
    shape: UnitShape
    pool_of: Callable[[int], PoolShape]
    cost: CostModel
    seed: int
    corpus: str
    config: dict[str, object]
    standbys: int = 0
    save_every: int = 0
    keep: int = 2
    failure_window_s: float = 3600.0
    timeouts: Timeouts = Timeouts()
