"""`hydra-ray train`: run here, on an embedded Ray of its own, until done."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydra_ray.cli.output import JsonFlag, say, say_json
from hydra_ray.cli.prepare import describe
from hydra_ray.cli.progress import progress
from hydra_ray.cli.training_display import training_display

if TYPE_CHECKING:
    from hydra_ray.config import Recipe
    from hydra_ray.launch import LiveRun
    from hydra_ray.rundir import RunDirectory

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe, a YAML file.")]
OverrideArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings on top of it.")
]
RunNameOption = Annotated[
    str | None, typer.Option("--run-name", help="The run's name; default: the recipe's.")
]
ResumeFlag = Annotated[
    bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")
]


def train(
    recipe_path: RecipeArgument,
    overrides: OverrideArguments = None,
    run_name: RunNameOption = None,
    resume: ResumeFlag = False,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Train a recipe on this machine; Ctrl-C ends after the step in hand, with a checkpoint."""
    from hydra_ray.config import load_recipe

    recipe = load_recipe(recipe_path, overrides or [])
    run = run_name or recipe.name
    directory = check_and_prepare(recipe, run, resume=resume, local=True)
    result = _train_here(recipe, run, directory, dashboard=dashboard, as_json=as_json)
    interrupted = result.pop("interrupted")
    if as_json:
        say_json(result)
    else:
        say(f"{result['state']} at step {result['steps']}; see {result['run_dir']}")
    if interrupted:
        raise KeyboardInterrupt


def check_and_prepare(recipe: "Recipe", run: str, *, resume: bool, local: bool) -> "RunDirectory":
    """Check everything that can be wrong, and make the corpus where the recipe names sources.

    Raises:
        InputError: something is; no run was started and no run directory made.
    """
    from hydra_ray.driver.actor import checkpoints_of
    from hydra_ray.preflight import (
        check_corpus,
        check_machine,
        check_recipe,
        open_corpus,
        usable_cores,
    )
    from hydra_ray.resume import check_nothing_to_resume, check_resume
    from hydra_ray.rundir import check_name_is_free, run_directory

    directory = run_directory(recipe.storage_path, run)
    check_name_is_free(directory, resume=resume)
    check_recipe(recipe)
    checkpoints = checkpoints_of(recipe, run, directory)
    if not resume:
        check_nothing_to_resume(checkpoints)
    if local:
        check_machine(recipe, num_cpus=usable_cores(), num_gpus=_usable_gpus())
    with (
        progress("preparing the corpus") as advance,
        open_corpus(
            recipe, on_progress=lambda s: advance(s.done_bytes, s.total_bytes, describe(s))
        ) as index,
    ):
        check_corpus(recipe, index)
        if resume:
            check_resume(recipe, checkpoints, index.fingerprint())
    return directory


def _usable_gpus() -> int:
    """GPUs this process may use, counted without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _train_here(
    recipe: "Recipe", run: str, directory: "RunDirectory", *, dashboard: bool, as_json: bool
) -> dict[str, Any]:
    from hydra_ray.launch import embedded_ray, start

    out = sys.stderr if as_json else sys.stdout
    with embedded_ray(dashboard=dashboard) as dashboard_url:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        out.write(f"run {run} in {directory.root}\n")
        if dashboard_url:
            out.write(f"dashboard {dashboard_url}\n")
        out.flush()
        live = start(recipe, run, directory, dashboard_url=dashboard_url, local=True)
        with training_display(recipe.steps, out) as show:
            return see_out(live, show)


def see_out(live: "LiveRun", show: Any) -> dict[str, Any]:
    """Follow the run to its end; the first interrupt asks it to stop, a second one ends it."""
    from hydra_ray.launch import follow, stop

    try:
        return {**follow(live, show), "interrupted": False}
    except KeyboardInterrupt:
        sys.stderr.write("stopping after the step in hand; interrupt again to end at once\n")
        stop(live)
        return {**follow(live, lambda _: None), "interrupted": True}
