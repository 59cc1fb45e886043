"""What the recipe sets for the training loop, in the loop's own terms."""

from collections.abc import Callable
from dataclasses import dataclass

from hydra_ray.config import Recipe
from hydra_ray.data.index import SequenceIndex
from hydra_ray.driver.decisions import Limits
from hydra_ray.driver.placement import UnitShape
from hydra_ray.preflight import smallest_pool
from planner.cost import CostModel
from planner.pool import PoolShape

UNBOUNDED = 1 << 30


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


def unit_shape(recipe: Recipe) -> UnitShape:
    """The processes of one scale unit."""
    axes = recipe.parallel
    return UnitShape(tensor=axes.tensor, pipeline=axes.pipeline, expert=axes.expert)


def settings_of(recipe: Recipe, index: SequenceIndex) -> Settings:
    """What a recipe asks for, with a corpus as it is."""
    elastic, axes = recipe.elastic, recipe.parallel
    unit = axes.scale_unit
    return Settings(
        num_steps=recipe.steps,
        limits=Limits(
            min_units=smallest_pool(recipe, int(index.lengths.max())) // unit,
            max_units=(elastic.max or UNBOUNDED) // unit,
            max_failures=elastic.max_failures,
            start_s=elastic.grow_timeout_s,
            wait_s=elastic.wait_timeout_s,
        ),
        shape=unit_shape(recipe),
        pool_of=lambda num_units: recipe.pool_shape(num_units * axes.expert),
        cost=recipe.cost_model(),
        seed=recipe.seed,
        corpus=index.fingerprint(),
        config=recipe.model_dump(mode="json"),
        standbys=-(-elastic.standbys // unit),
        save_every=recipe.checkpoint.every_steps,
        keep=recipe.checkpoint.keep,
        failure_window_s=elastic.failure_window_s,
        timeouts=Timeouts(grow_s=elastic.grow_timeout_s),
    )
