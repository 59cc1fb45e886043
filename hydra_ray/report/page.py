"""Writes the report: a run directory in, one self-contained HTML file out."""

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from hydra_ray.report.charts import MOST_POINTS, Record, charts
from hydra_ray.rundir import RunDirectory
from planner.errors import InputError

SHOWN_EVENTS = 500


def write_report(run_dir: Path, out: Path) -> dict[str, Any]:
    """Draw the run of `run_dir` into `out`; returns the run in figures.

    Raises:
        InputError: that is no run directory, or no step was completed.
    """
    directory = RunDirectory(run_dir.resolve())
    if not directory.exists():
        raise InputError(
            "no run directory there",
            value=str(run_dir),
            limit="a folder with config.yaml",
            remedy="Give the run's folder, such as runs/quickstart.",
        )
    steps, events = directory.steps(), directory.events()
    if not steps:
        raise InputError(
            "the run has no completed step to show",
            value=str(run_dir),
            remedy="Wait for the first step; see run.log if there is none.",
        )
    figures = summarize(run_dir.resolve().name, steps, events)
    out.write_text(_render(directory.config(), figures, steps, events), encoding="utf-8")
    return figures


def summarize(run: str, steps: Sequence[Record], events: Sequence[Record]) -> dict[str, Any]:
    """The run in a few figures."""
    states = [event["state"] for event in events if event["event"] == "state"]
    generations = [event for event in events if event["event"] == "generation"]
    tokens = sum(step["tokens"] for step in steps)
    wall_s = sum(step["wall_s"] for step in steps)
    losses = [step["loss"] for step in steps if step["loss"] is not None]
    return {
        "run": run,
        "state": states[-1] if states else "starting",
        "steps": steps[-1]["step"],
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s if wall_s else None,
        "ranks": steps[-1]["num_ranks"],
        "load_max_over_mean": sum(step["load_max_over_mean"] for step in steps) / len(steps),
        "pool_changes": sum(event["cause"] != "start" for event in generations),
        "pause_s": sum(event["pause_s"] for event in generations if event["cause"] != "start"),
    }


def _render(
    config: str, figures: dict[str, Any], steps: Sequence[Record], events: Sequence[Record]
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hydra_ray.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    drawn = charts(steps, events)
    figures_json = "[" + ",".join(chart.figure.to_json() for chart in drawn) + "]"
    return environment.get_template("page.html.j2").render(
        figures=figures,
        tiles=_tiles(figures),
        charts=drawn,
        plotly=get_plotlyjs(),
        figures_json=figures_json.replace("</", "<\\/"),
        events=[_event_row(event) for event in events[-SHOWN_EVENTS:]],
        left_out=max(0, len(events) - SHOWN_EVENTS),
        thinned=len(steps) > MOST_POINTS,
        config=config,
    )


def _tiles(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary's figures as they are shown."""
    return [
        ("steps", f"{figures['steps']:,}"),
        ("loss", f"{_figure(figures['first_loss'])} → {_figure(figures['last_loss'])}"),
        ("tokens a second", _figure(figures["tokens_per_s"])),
        ("tokens", _figure(figures["tokens"])),
        ("ranks", str(figures["ranks"])),
        ("load imbalance, mean", f"{figures['load_max_over_mean']:.3f}"),
        ("pool changes", str(figures["pool_changes"])),
        ("paused by them", f"{figures['pause_s']:.1f} s"),
    ]


def _figure(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def _event_row(event: Record) -> tuple[str, str, str]:
    """Wall clock, kind and facts of an event."""
    at = dt.datetime.fromtimestamp(event["time"], tz=dt.UTC)
    facts = {key: value for key, value in event.items() if key not in ("time", "event")}
    text = ", ".join(f"{key} {_fact(value)}" for key, value in facts.items())
    return at.strftime("%Y-%m-%d %H:%M:%S"), str(event["event"]), text


def _fact(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
