"""How every command speaks: results on stdout, errors on stderr, JSON when asked."""

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from planner.errors import HydraError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def say(line: str = "") -> None:
    """One line of plain text on stdout, seen at once even through a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def say_json(values: Mapping[str, Any]) -> None:
    """One JSON object as one line on stdout."""
    say(json.dumps(values, default=str))


def say_table(rows: Mapping[str, Any]) -> None:
    """Names and values, one a line, aligned."""
    width = max((len(name) for name in rows), default=0)
    for name, value in rows.items():
        say(f"{name:<{width}}  {value}")


def say_error(error: HydraError, *, as_json: bool) -> None:
    """What is wrong, the value, the limit and the remedy, on stderr."""
    if as_json:
        fields = {
            "kind": type(error).__name__,
            "what": error.what,
            "value": error.value,
            "limit": error.limit,
            "remedy": error.remedy,
            "exit_code": error.exit_code,
        }
        sys.stderr.write(json.dumps({"error": fields}, default=str) + "\n")
        return
    sys.stderr.write(f"error: {error.what}\n")
    for label, value in (("got", error.value), ("limit", error.limit)):
        if value is not None:
            sys.stderr.write(f"  {label}: {value}\n")
    if error.remedy:
        sys.stderr.write(f"  {error.remedy}\n")
