"""The page of all recipe keys, from the recipe's own types.

`python -m hydra_ray.config.reference > docs/recipe.md` writes it; a test keeps the two the same.
"""

import sys
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hydra_ray.config.recipe import Recipe

HEAD = """# Recipe keys

A recipe is one YAML file. `hydra-ray train RECIPE key=value section.key=value` sets keys on top of
it. A key that is not listed here is an error, and so is a key given twice. Sizes of the pool count
worker processes; a worker is one process with one place in the pool.

The files in `jobs/` are recipes that load; `config.yaml` in a run's directory is the recipe as it
was resolved.
"""


def recipe_reference() -> str:
    """Markdown tables of every key: its default and what it means."""
    parts = [HEAD, *_table(Recipe, "")]
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            parts += [f"\n## {name}\n", f"{(section.__doc__ or '').strip()}\n"]
            parts += _table(section, f"{name}.")
    return "\n".join(parts) + "\n"


def _table(section: type[BaseModel], prefix: str) -> list[str]:
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        meaning = (field.description or "") + _choices(field)
        rows.append(f"| `{prefix}{name}` | {_default(field)} | {meaning} |")
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default
    if value is None or value == ():
        return "absent"
    shown = str(value).lower() if isinstance(value, bool) else f"{value}"
    return f"`{shown}`"


def _choices(field: FieldInfo) -> str:
    """The legal words of a choice, where the description does not say them."""
    if get_origin(field.annotation) is not Literal:
        return ""
    words = [str(word) for word in get_args(field.annotation)]
    return f" One of {', '.join(words)}."


if __name__ == "__main__":
    sys.stdout.write(recipe_reference())
