"""What a Ray job runs: `python -m jobs.train_job RUN [--resume]`, on the cluster's own Ray.

`hydra-ray submit` puts the resolved recipe into the job's environment.
"""

import argparse
import json
import os
import signal
import sys

import ray

from hydra_ray.cli.output import say_error, say_json
from hydra_ray.cli.submit import RECIPE_VARIABLE
from hydra_ray.cli.train import check_and_prepare, see_out
from hydra_ray.cli.training_display import training_display
from hydra_ray.config import Recipe
from hydra_ray.driver.actor import NAMESPACE
from hydra_ray.launch import start
from hydra_ray.preflight import check_cluster
from planner.errors import HydraError


def main() -> int:
    """Run the job and return its exit code."""
    parser = argparse.ArgumentParser(prog="jobs.train_job")
    parser.add_argument("run")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    try:
        train(arguments.run, resume=arguments.resume)
    except HydraError as error:
        say_error(error, as_json=False)
        return error.exit_code
    return 0


def train(run: str, *, resume: bool) -> None:
    """Train the recipe of the environment on the cluster this job was submitted to."""
    recipe = Recipe.model_validate(json.loads(os.environ[RECIPE_VARIABLE]))
    directory = check_and_prepare(recipe, run, resume=resume, local=False)
    ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if not recipe.elastic.follow_cluster:
            check_cluster(recipe, ray.cluster_resources())
        live = start(recipe, run, directory, local=False)
        with training_display(recipe.steps, sys.stdout) as show:
            say_json(see_out(live, show))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
