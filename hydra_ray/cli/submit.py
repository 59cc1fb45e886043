"""`hydra-ray submit`: the same run as a Ray job on a cluster."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydra_ray.cli.output import JsonFlag, say, say_json
from hydra_ray.cli.train import OverrideArguments, RecipeArgument, ResumeFlag, RunNameOption
from planner.errors import HydraError

if TYPE_CHECKING:
    from hydra_ray.config import Recipe

RECIPE_VARIABLE = "HYDRA_RAY_RECIPE"
NOT_SENT = [".venv", ".git", "runs", "build", "tests", "docs", "benchmarks", "**/__pycache__"]


class SubmitError(HydraError):
    """A cluster did not take a job."""


def submit(
    recipe_path: RecipeArgument,
    overrides: OverrideArguments = None,
    run_name: RunNameOption = None,
    resume: ResumeFlag = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="The cluster's dashboard, http://host:8265; default: RAY_API_SERVER_ADDRESS, "
            "then RAY_ADDRESS.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Submit a recipe to a Ray cluster; storage and corpus must be where every node finds them."""
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    from hydra_ray.config import load_recipe
    from hydra_ray.rundir import run_directory

    recipe = load_recipe(recipe_path, overrides or [])
    run = run_name or recipe.name
    run_directory(recipe.storage_path, run)  # refuses a name that no run can have
    check_paths(recipe)
    where = cluster_address(address)
    try:
        job_id = JobSubmissionClient(where).submit_job(
            entrypoint=f"python -m jobs.train_job {run}" + (" --resume" if resume else ""),
            runtime_env=runtime_env(recipe),
            metadata={"job_name": f"hydra-{run}"},
        )
    except (AuthenticationError, ConnectionError, RuntimeError) as error:
        raise SubmitError(
            "the cluster did not take the job",
            value=where,
            limit=str(error).splitlines()[0],
            remedy="Check the address and RAY_AUTH_MODE, and that the cluster is up.",
        ) from error
    if as_json:
        say_json({"run": run, "job_id": job_id})
    else:
        say(f"{run} submitted as job {job_id}")


def cluster_address(given: str | None) -> str:
    """The dashboard to submit to.

    Raises:
        InputError: none is named anywhere.
    """
    from planner.errors import InputError

    for address in (given, os.environ.get("RAY_API_SERVER_ADDRESS"), os.environ.get("RAY_ADDRESS")):
        if address:
            return address
    raise InputError(
        "no Ray cluster is named",
        remedy="Pass --address http://host:8265, or set RAY_API_SERVER_ADDRESS.",
    )


def check_paths(recipe: "Recipe") -> None:
    """A job runs on another machine: what it reads and writes needs a path that holds there.

    Raises:
        InputError: a path is relative.
    """
    from planner.errors import InputError

    paths = {
        "storage_path": recipe.storage_path,
        "data.corpus": recipe.data.corpus,
        "checkpoint.path": recipe.checkpoint.path,
    }
    for key, path in paths.items():
        if path is not None and "://" not in path and not Path(path).is_absolute():
            raise InputError(
                f"{key} is relative, and a job runs elsewhere",
                value=path,
                limit="an absolute path that every node shares",
                remedy=f"For example {key}=/shared/{path}.",
            )


def runtime_env(recipe: "Recipe") -> dict[str, Any]:
    """What the job brings along: the checkout, and the resolved recipe."""
    checkout = Path(__file__).resolve().parents[2]
    return {
        "working_dir": str(checkout),
        "excludes": NOT_SENT,
        "env_vars": {
            RECIPE_VARIABLE: json.dumps(recipe.model_dump(mode="json")),
            "PYTHONUNBUFFERED": "1",
        },
    }
