"""Draws plans: ranks across, microbatches down, coloured by load, sequences in every group."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from planner.cost import CostModel, FloatArray
from planner.iteration import group_loads_s
from planner.plan import Plan, group_tokens
from planner.pool import IntArray
from planner.summary import PlanSummary

WIDTH = 1000
ROW = 24
LABEL_WIDTH = 7  # of one digit, in the labels' font
MOST_GROUPS = 20_000
MOST_NAMED = 12
# From light to dark: the share of the heaviest load.
COLORS = ("#edf4fb", "#cfe1f2", "#a9cfe6", "#74b2d8", "#4592c6", "#2171b5", "#0f529a", "#08306b")


@dataclass(frozen=True, slots=True)
class MadePlan:
    """A plan with what it comes to and the seconds it took to make."""

    plan: Plan
    summary: PlanSummary
    plan_s: float


@dataclass(frozen=True, slots=True)
class Box:
    """One group as a rectangle of the drawing, in its units."""

    x: float
    y: int
    width: float
    color: str
    ink: str
    label: str
    tip: str


@dataclass(frozen=True, slots=True)
class Row:
    """One microbatch: its heaviest load as a bar beside the ranks."""

    name: str
    y: int
    bar: float
    heaviest: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """All boxes of one plan; `left_out` microbatches are not drawn."""

    title: str
    facts: list[tuple[str, str]]
    boxes: list[Box]
    rows: list[Row]
    height: int
    left_out: int


def write_plan_page(plans: list[MadePlan], cost: CostModel, out: Path) -> None:
    """Write one self-contained HTML page with a drawing for every plan."""
    environment = Environment(
        loader=PackageLoader("hydra_ray.report", "."), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template("plan.html.j2").render(
        drawings=draw(plans, cost),
        pool=plans[0].plan.pool,
        colors=COLORS,
        width=WIDTH,
        row=ROW,
    )
    out.write_text(page)


def draw(plans: list[MadePlan], cost: CostModel) -> list[Drawing]:
    """The drawing of every plan, all in the colours of one scale."""
    loads = [group_loads_s(made.plan, cost.table(made.plan.pool)) for made in plans]
    heaviest = max(float(each.max(initial=0.0)) for each in loads) or 1.0
    return [_draw_one(made, each, heaviest) for made, each in zip(plans, loads, strict=True)]


def _draw_one(made: MadePlan, loads: FloatArray, heaviest: float) -> Drawing:
    """At most MOST_GROUPS groups, whole microbatches."""
    plan = made.plan
    shown = _microbatches_shown(plan)
    drawn = int(np.searchsorted(plan.group_microbatch, shown))
    tokens = group_tokens(plan)
    heights = np.zeros(plan.num_microbatches)
    np.maximum.at(heights, plan.group_microbatch, loads)
    return Drawing(
        title=made.summary.planner,
        facts=_facts(made),
        boxes=[
            _box(plan, g, loads[g] / heaviest, _tip(plan, g, loads, tokens)) for g in range(drawn)
        ],
        rows=[
            Row(f"MB {mb}", mb * ROW, float(heights[mb]) / heaviest, f"{heights[mb]:.3f} s")
            for mb in range(shown)
        ],
        height=shown * ROW,
        left_out=plan.num_microbatches - shown,
    )


def _microbatches_shown(plan: Plan) -> int:
    if plan.num_groups <= MOST_GROUPS:
        return plan.num_microbatches
    return max(1, int(plan.group_microbatch[MOST_GROUPS]))


def _box(plan: Plan, group: int, share: float, tip: str) -> Box:
    scale = WIDTH / plan.pool.num_ranks
    width = float(plan.group_size[group]) * scale
    members = plan.group_members(group)
    longest = f"{int(plan.lengths[members].max()):,}"
    more = f" +{len(members) - 1}" if len(members) > 1 else ""
    fits = [text for text in (longest + more, longest) if len(text) * LABEL_WIDTH < width]
    level = min(len(COLORS) - 1, int(share * len(COLORS)))
    return Box(
        x=float(plan.group_start[group]) * scale,
        y=int(plan.group_microbatch[group]) * ROW,
        width=width,
        color=COLORS[level],
        ink="#fff" if level >= len(COLORS) // 2 else "#1d2129",
        label=fits[0] if fits else "",
        tip=tip,
    )


def _tip(plan: Plan, group: int, loads: FloatArray, tokens: IntArray) -> str:
    """What pointing at a group says: its ranks, its factorisation, its load, its sequences."""
    first, size = int(plan.group_start[group]), int(plan.group_size[group])
    ulysses = int(plan.group_ulysses[group])
    members = plan.group_members(group)
    named = [f"#{place}: {int(plan.lengths[place]):,}" for place in members[:MOST_NAMED]]
    more = [f"and {len(members) - MOST_NAMED} more"] if len(members) > MOST_NAMED else []
    lines = [
        f"MB {int(plan.group_microbatch[group])}, ranks {first} to {first + size - 1}",
        f"CP {size} = Ulysses {ulysses} x ring {size // ulysses}",
        f"load {loads[group]:.4g} s, {int(tokens[group]):,} of {plan.pool.token_budget:,} tokens",
        f"{len(members)} sequences",
        *named,
        *more,
    ]
    return "\n".join(lines)


def _facts(made: MadePlan) -> list[tuple[str, str]]:
    summary = made.summary
    slots = summary.num_microbatches * summary.num_ranks
    idle = summary.idle_slots / slots if slots else 0.0
    return [
        ("sequences", f"{summary.num_sequences:,}"),
        ("microbatches", f"{summary.num_microbatches:,}"),
        ("iteration, predicted", f"{summary.iteration_s:.4g} s"),
        ("over the lower bound", f"{summary.bound_ratio:.3f}"),
        ("load max / mean", f"{summary.imbalance:.2f}"),
        ("tokens max", f"{summary.tokens_max:,}"),
        ("idle rank slots", f"{idle:.1%}"),
        ("planning time", f"{made.plan_s * 1e3:.2f} ms"),
    ]
