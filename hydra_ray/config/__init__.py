"""A recipe: one YAML file that says what to train, on what, and how."""

from hydra_ray.config.load import dump_recipe, load_recipe
from hydra_ray.config.recipe import Recipe

__all__ = ["Recipe", "dump_recipe", "load_recipe"]
