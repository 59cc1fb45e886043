"""How a run shows itself: a progress bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from hydra_ray.driver.journal import Line

QUIET_EVENTS = frozenset({"state"})


@contextmanager
def training_display(num_steps: int, out: TextIO) -> Iterator[Callable[["Line"], None]]:
    """Show the run's steps and events on `out` while the block runs."""
    if out.isatty():
        with _bar(num_steps, out) as show:
            yield show
    else:
        yield lambda line: _print(line, num_steps, out)


def describe_step(step: Mapping[str, Any]) -> str:
    """One step in a few words."""
    loss = "loss   n/a  " if step["loss"] is None else f"loss {step['loss']:8.4f}"
    rate = f"{step['tokens_per_s'] or 0:10,.0f} tokens/s"
    degrees = " ".join(f"{degree}:{count}" for degree, count in step["degrees"].items())
    return f"{loss}  {rate}  degrees {degrees}  load max/mean {step['load_max_over_mean']:.2f}"


def describe_event(event: Mapping[str, Any]) -> str:
    """One event in a few words."""
    facts = "  ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in event.items()
        if name not in {"time", "event"}
    )
    return f"[{event['event']}] {facts}"


def _print(line: "Line", num_steps: int, out: TextIO) -> None:
    if line.kind == "step":
        width = len(str(num_steps))
        text = f"step {line.record['step']:>{width}}/{num_steps}  {describe_step(line.record)}"
    elif line.record["event"] in QUIET_EVENTS:
        return
    else:
        text = describe_event(line.record)
    out.write(text + "\n")
    out.flush()


@contextmanager
def _bar(num_steps: int, out: TextIO) -> Iterator[Callable[["Line"], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(file=sys.stderr if out is sys.stderr else sys.stdout)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=num_steps, said="starting workers")

        def show(line: "Line") -> None:
            if line.kind == "step":
                said = describe_step(line.record)
                bar.update(task, completed=line.record["step"], said=said)
            elif line.record["event"] not in QUIET_EVENTS:
                bar.console.print(describe_event(line.record), markup=False, highlight=False)

        yield show
