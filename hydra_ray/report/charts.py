"""Charts of a run: records of steps.jsonl and events.jsonl in, plotly figures out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

Record = dict[str, Any]

MOST_POINTS = 4000
HEIGHT = 280
BLUE, ORANGE, GREEN, RED, GREY = "#2f6fb3", "#d9822b", "#3d8f5f", "#c0392b", "#8a8f98"
DEGREE_COLORS = ("#cfe1f2", "#93c4de", "#4d99ca", "#1f6cb0", "#0a4488", "#08254d")


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with the question it answers."""

    title: str
    caption: str
    figure: go.Figure


def charts(steps: Sequence[Record], events: Sequence[Record]) -> list[Chart]:
    """Every chart the records have data for."""
    kept = thin(steps)
    marks = membership_marks(steps, events)
    drawn = [draw(kept) for draw in _DRAWN]
    for chart in drawn:
        _mark(chart.figure, marks)
    return drawn


def thin(steps: Sequence[Record]) -> list[Record]:
    """At most MOST_POINTS steps, evenly spaced, the last one among them."""
    stride = -(-len(steps) // MOST_POINTS) or 1
    return [*steps[::-1][::stride]][::-1]


def membership_marks(steps: Sequence[Record], events: Sequence[Record]) -> list[tuple[int, str]]:
    """Changes of the pool after the start: the first step of each, and its cause."""
    first: dict[int, int] = {}
    for step in steps:
        first.setdefault(step["generation"], step["step"])
    causes = {e["generation"]: e for e in events if e["event"] == "generation"}
    return [
        (step, f"{causes[generation]['cause']} → {causes[generation]['num_ranks']} ranks")
        for generation, step in first.items()
        if generation in causes and causes[generation]["cause"] != "start"
    ]


def _loss(steps: list[Record]) -> Chart:
    figure = _figure("loss (nats a token)", [_line(steps, "loss", "loss", BLUE)])
    return Chart("Loss", "Mean cross-entropy of all tokens of the global batch.", figure)


def _speed(steps: list[Record]) -> Chart:
    figure = _figure("tokens a second", [_line(steps, "tokens_per_s", "tokens/s", GREEN)])
    figure.update_yaxes(rangemode="tozero")
    return Chart("Speed", "Tokens of the step over its wall time.", figure)


def _time(steps: list[Record]) -> Chart:
    predicted = _line(steps, "predicted_s", "predicted", GREY)
    predicted.update(visible="legendonly")
    traces = [
        _line(steps, "wall_s", "step, wall", BLUE),
        _line(steps, "plan_s", "planning", ORANGE),
        predicted,
    ]
    figure = _figure("seconds", traces)
    figure.update_yaxes(rangemode="tozero")
    caption = (
        "Wall time of each step; planning runs while the step before trains. The cost model's "
        "prediction shows on a click."
    )
    return Chart("Time", caption, figure)


def _degrees(steps: list[Record]) -> Chart:
    degrees = sorted({int(degree) for step in steps for degree in step["degrees"]})
    x = [step["step"] for step in steps]
    bars = [
        go.Bar(
            x=x,
            y=[step["degrees"].get(str(degree), 0) for step in steps],
            name=f"degree {degree}",
            marker_color=DEGREE_COLORS[min(place, len(DEGREE_COLORS) - 1)],
            marker_line_width=0,
        )
        for place, degree in enumerate(degrees)
    ]
    figure = _figure("sequences", bars)
    figure.update_layout(barmode="stack", bargap=0.1)
    caption = "Sequences of each step by the CP degree the plan gave them."
    return Chart("Degrees", caption, figure)


def _balance(steps: list[Record]) -> Chart:
    figure = _figure("max / mean", [_line(steps, "load_max_over_mean", "imbalance", RED)])
    caption = (
        "Load of the heaviest rank over the mean, by the cost model, all microbatches of the "
        "step together: 1 is perfect balance."
    )
    return Chart("Load imbalance", caption, figure)


def _microbatches(steps: list[Record]) -> Chart:
    traces = [
        _line(steps, "num_microbatches", "microbatches", BLUE, shape="hv"),
        _line(steps, "num_ranks", "HDP ranks", ORANGE, shape="hv"),
    ]
    figure = _figure("count", traces)
    figure.update_yaxes(rangemode="tozero", dtick=_whole_ticks(steps))
    return Chart("Pool", "Ranks of the pool, and microbatches each of them ran.", figure)


def _traffic(steps: list[Record]) -> Chart:
    kinds = sorted({kind for step in steps for kind in step["bytes_sent"]})
    x = [step["step"] for step in steps]
    areas = [
        go.Scatter(
            x=x,
            y=[step["bytes_sent"].get(kind, 0) / 1e6 for step in steps],
            name=kind.replace("_", "-"),
            stackgroup="all",
            mode="lines",
            line={"width": 0.5, "color": color},
        )
        for kind, color in zip(kinds, (BLUE, ORANGE, GREEN, GREY), strict=False)
    ]
    figure = _figure("MB sent", areas)
    caption = "Context-parallel traffic of all ranks in the step, forward and backward."
    return Chart("Communication", caption, figure)


def _optimizer(steps: list[Record]) -> Chart:
    rate = _line(steps, "lr", "learning rate", GREY)
    rate.update(yaxis="y2")
    figure = _figure("gradient norm", [_line(steps, "grad_norm", "gradient norm", BLUE), rate])
    figure.update_layout(
        yaxis2={
            "overlaying": "y",
            "side": "right",
            "title": "learning rate",
            "showgrid": False,
            "rangemode": "tozero",
            "tickmode": "auto",
            "nticks": 4,
            "tickformat": "~g",
        }
    )
    return Chart("Optimizer", "Gradient norm before clipping, and the learning rate.", figure)


_DRAWN: tuple[Callable[[list[Record]], Chart], ...] = (
    _loss,
    _speed,
    _time,
    _degrees,
    _balance,
    _microbatches,
    _traffic,
    _optimizer,
)


def _line(steps: list[Record], key: str, name: str, color: str, *, shape: str = "linear") -> Any:
    return go.Scatter(
        x=[step["step"] for step in steps],
        y=[step.get(key) for step in steps],
        name=name,
        mode="lines",
        line={"color": color, "width": 1.8, "shape": shape},
    )


def _figure(unit: str, traces: Sequence[Any]) -> go.Figure:
    figure = go.Figure(data=list(traces))
    figure.update_layout(
        template="plotly_white",
        height=HEIGHT,
        margin={"l": 60, "r": 20, "t": 10, "b": 40},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.14, "x": 0, "traceorder": "normal"},
        showlegend=len(traces) > 1,
        font={"family": "system-ui, sans-serif", "size": 12},
    )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=unit)
    return figure


def _mark(figure: go.Figure, marks: list[tuple[int, str]]) -> None:
    for step, label in marks:
        figure.add_vline(
            x=step,
            line={"color": GREY, "dash": "dot", "width": 1},
            annotation={"text": label, "font": {"size": 10}, "textangle": -90},
            annotation_position="top right",
        )


def _whole_ticks(steps: list[Record]) -> int:
    top = max((max(step["num_microbatches"], step["num_ranks"]) for step in steps), default=1)
    return max(1, top // 6)
