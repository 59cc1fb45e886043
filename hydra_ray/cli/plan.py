"""`hydra-ray plan`: plan a batch of lengths and say, or draw, what came out."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydra_ray.cli.output import JsonFlag, say, say_json, say_table

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hydra_ray.report.plan_page import MadePlan
    from planner.cost import CostModel
    from planner.iteration import Coupling
    from planner.pool import PoolShape

    IntArray = npt.NDArray[np.int64]


def plan(
    lengths: Annotated[
        Path, typer.Argument(help="A corpus, or a .parquet, .csv, .jsonl or .npy of lengths.")
    ],
    ranks: Annotated[int, typer.Option(help="G, the HDP ranks of the pool.")],
    token_budget: Annotated[int, typer.Option(help="B, most padded tokens a rank and MB.")],
    context: Annotated[
        int | None, typer.Option(min=1, help="Cut longer sequences to this many tokens.")
    ] = None,
    stages: Annotated[int, typer.Option(help="p, pipeline stages.")] = 1,
    chunks: Annotated[int, typer.Option(help="v, virtual chunks a stage.")] = 1,
    expert_ranks: Annotated[
        int, typer.Option(help="HDP ranks that share experts; they wait for each other.")
    ] = 1,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Plan a random batch of about so many tokens; default: all."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random batch.")] = 0,
    planner: Annotated[str, typer.Option(help="hydra, hydra-opt, static or mcore-v2.")] = "hydra",
    compare: Annotated[
        bool, typer.Option("--compare", help="Every planner, side by side.")
    ] = False,
    cost: Annotated[str, typer.Option(help="What costs are of: dense, moe or mla.")] = "dense",
    column: Annotated[str, typer.Option(help="The column that has the lengths.")] = "length",
    html: Annotated[Path | None, typer.Option(help="Draw ranks by microbatches here.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Plan one step for a batch of sequence lengths, without training."""
    from hydra_ray.data.lengths_file import read_lengths
    from planner.pool import PoolShape
    from planner.presets import preset
    from planner.registry import get_planner, planner_names

    pool = PoolShape(
        num_ranks=ranks,
        token_budget=token_budget,
        stages=stages,
        chunks=chunks,
        expert_ranks=expert_ranks,
    )
    costs = preset(cost)
    names = planner_names() if compare else (get_planner(planner).name,)
    batch = read_lengths(lengths, column)
    num_cut = int((batch > context).sum()) if context else 0
    batch = batch.clip(max=context) if context else batch
    batch = _random_batch(batch, batch_tokens, seed) if batch_tokens else batch
    plans = [_make(name, batch, pool, costs) for name in names]
    if html:
        from hydra_ray.report.plan_page import write_plan_page

        write_plan_page(plans, costs, html)
    facts = {"lengths": str(lengths), "sequences": len(batch), "tokens": int(batch.sum())}
    facts |= {"cut_to_context": num_cut, "ranks": ranks, "token_budget": token_budget}
    facts |= {"stages": stages, "chunks": chunks, "cost": cost}
    if as_json:
        drawn = {"html": str(html)} if html else {}
        say_json({**facts, **drawn, "plans": [_record(made) for made in plans]})
        return
    say_table(
        {
            name.replace("_", " "): f"{value:,}" if isinstance(value, int) else value
            for name, value in facts.items()
        }
    )
    _say_plans(plans)
    if html:
        say(f"\ndrawn in {html}")


def _random_batch(lengths: "IntArray", num_tokens: int, seed: int) -> "IntArray":
    """Sequences in random order until the next would exceed the tokens; at least one."""
    import numpy as np

    shuffled = np.random.default_rng(seed).permutation(lengths)
    taken = max(1, int(np.searchsorted(np.cumsum(shuffled), num_tokens, side="right")))
    return shuffled[:taken]


def _make(name: str, lengths: "IntArray", pool: "PoolShape", cost: "CostModel") -> "MadePlan":
    """Plan, validate, and time it: compiled code is read before the clock starts."""
    from hydra_ray.report.plan_page import MadePlan
    from planner.registry import get_planner
    from planner.summary import summarize
    from planner.validate import validate

    chosen = get_planner(name)
    chosen.plan(lengths[:1], pool, cost)
    started = time.perf_counter()
    made = chosen.plan(lengths, pool, cost)
    plan_s = time.perf_counter() - started
    validate(made)
    coupling: Coupling = "pool" if pool.expert_ranks == 1 else pool.expert_ranks
    return MadePlan(made, summarize(made, cost, coupling), plan_s)


def _record(made: "MadePlan") -> dict[str, Any]:
    summary = made.summary
    return {
        **asdict(summary),
        "bound_ratio": summary.bound_ratio,
        "imbalance": summary.imbalance,
        "plan_s": made.plan_s,
        "digest": made.plan.digest(),
    }


def _say_plans(plans: "list[MadePlan]") -> None:
    """One column a planner."""
    columns = [plan_rows(made) for made in plans]
    say()
    for name in columns[0]:
        values = "".join(f"{column[name]:>16}" for column in columns)
        say(f"{name:<26}{values}")
    for made in plans:
        degrees = ", ".join(
            f"{degree} x {count:,}" for degree, count in made.summary.groups_of_degree.items()
        )
        say(f"{'degrees of ' + made.summary.planner:<26}  {degrees}")


def plan_rows(made: "MadePlan") -> dict[str, str]:
    """The numbers of one plan, as shown."""
    summary = made.summary
    return {
        "planner": summary.planner,
        "target": f"{summary.target:.4g}",
        "microbatches": f"{summary.num_microbatches:,}",
        "load max": f"{summary.load_max_s:.4g} s",
        "load mean": f"{summary.load_mean_s:.4g} s",
        "load max / mean": f"{summary.imbalance:.3f}",
        "tokens max": f"{summary.tokens_max:,}",
        "padding tokens": f"{summary.tokens_padding:,}",
        "idle rank slots": f"{summary.idle_slots:,}",
        "iteration predicted": f"{summary.iteration_s:.4g} s",
        "over the lower bound": f"{summary.bound_ratio:.3f}",
        "planning time": f"{made.plan_s * 1e3:.2f} ms",
    }
