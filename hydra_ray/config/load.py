"""Reads a recipe from YAML and `key=value` overrides; writes the resolved one back."""

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hydra_ray.config.recipe import Recipe
from planner.errors import InputError


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value` settings, each value read as YAML, applied in order.

    Raises:
        InputError: the file cannot be read, or a key or a value is wrong.
    """
    settings = _read_yaml(Path(path))
    for override in overrides:
        _apply(settings, override)
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        raise _input_error(error) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load_recipe` reads it back to an equal one."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader to which a key given twice is an error rather than the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002  PyYAML's own signature
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "the recipe cannot be read",
            value=str(path),
            limit=str(error),
            remedy="Give the path of a YAML recipe, such as jobs/quickstart.yaml.",
        ) from error
    try:
        settings = yaml.load(text, Loader=_UniqueKeys)  # noqa: S506  a SafeLoader
    except yaml.YAMLError as error:
        raise InputError(
            "the recipe is not valid YAML", value=str(path), limit=str(error)
        ) from error
    if not isinstance(settings, dict):
        raise InputError(
            "a recipe is a mapping of keys to values",
            value=f"{type(settings).__name__} in {path}",
            remedy="See jobs/quickstart.yaml for one that works.",
        )
    return settings


def _apply(settings: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value` in place."""
    key, equals, text = override.partition("=")
    if not (key and equals):
        raise InputError(
            "an override is written key=value", value=override, remedy="For example: steps=100."
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError("an override's value is not valid YAML", value=override) from error
    *parents, leaf = key.split(".")
    section = settings
    for parent in parents:
        below = section.setdefault(parent, {})
        if not isinstance(below, dict):
            raise InputError(
                f"{parent} is a value, so it has no keys of its own",
                value=override,
                remedy=f"Write {parent}=VALUE.",
            )
        section = below
    section[leaf] = value


def _input_error(error: ValidationError) -> InputError:
    """The first problem in full; the others by key."""
    problems = error.errors(include_url=False)
    first = _describe(problems[0])
    if len(problems) == 1:
        return first
    others = ", ".join(sorted({_dotted(p) or p["msg"] for p in problems[1:]}))
    remedy = f"{first.remedy} Also wrong: {others}.".strip()
    return InputError(first.what, value=first.value, limit=first.limit, remedy=remedy)


def _describe(problem: ErrorDetails) -> InputError:
    key, kind = _dotted(problem), problem["type"]
    if kind == "extra_forbidden":
        return InputError("unknown config key", value=key, remedy=_key_suggestion(problem["loc"]))
    if kind == "missing":
        return InputError("a config key is missing", value=key, remedy=f"Add {key} to the recipe.")
    message = problem["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return InputError(f"{key}: {message}" if key else message)
    return InputError(
        f"{key} cannot be used: {message}",
        value=repr(problem["input"]),
        limit=_limit(problem),
        remedy=f"Correct {key} in the recipe or on the command line.",
    )


def _dotted(problem: ErrorDetails) -> str:
    return ".".join(str(part) for part in problem["loc"])


def _limit(problem: ErrorDetails) -> str | None:
    """What would have been accepted, in symbols."""
    context = problem.get("ctx", {})
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{symbols[name]} {value}" for name, value in context.items() if name in symbols]
    if bounds:
        return " and ".join(bounds)
    expected = context.get("expected")
    return str(expected) if expected else None


def _key_suggestion(place: tuple[int | str, ...]) -> str:
    """The nearest known key: first in the same section, then anywhere."""
    known = list(_known_keys(Recipe, ""))
    wanted = ".".join(str(part) for part in place)
    section = wanted.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    by_leaf = {key.rpartition(".")[2]: key for key in known}
    leaf = wanted.rpartition(".")[2]
    if leaf in by_leaf:
        return f"Did you mean {by_leaf[leaf]}?"
    nearest = difflib.get_close_matches(wanted, siblings, n=1) or [
        by_leaf[name] for name in difflib.get_close_matches(leaf, list(by_leaf), n=1)
    ]
    if nearest:
        return f"Did you mean {nearest[0]}?"
    return f"Known keys: {', '.join(siblings or known)}."


def _known_keys(section: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys
