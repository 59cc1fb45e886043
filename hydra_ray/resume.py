"""What must hold before a run may go on from where it stopped."""

from typing import Any

from hydra_ray.config import Recipe
from hydra_ray.driver.checkpoints import Checkpoints
from planner.errors import InputError

DECIDES_THE_RUN = ("seed", "context", "global_batch_tokens", "model", "dtype")


def check_resume(recipe: Recipe, checkpoints: Checkpoints, corpus_fingerprint: str) -> None:
    """Check that the newest readable checkpoint is of this corpus and of settings that go on.

    Workers, planner, budget and the like may differ: they do not change what is computed.

    Raises:
        InputError: another corpus, or a setting that would make it another run.
        CheckpointError: there are checkpoints, and no manifest can be read.
    """
    manifest = checkpoints.newest_readable()
    if manifest is None:
        return
    now: dict[str, Any] = recipe.model_dump(mode="json")
    _check_tensor_ranks(manifest.config["parallel"]["tensor"], recipe.parallel.tensor)
    changed = [key for key in DECIDES_THE_RUN if manifest.config[key] != now[key]]
    if changed:
        raise InputError(
            "the recipe differs from the run that is to be resumed",
            value=", ".join(f"{key} = {now[key]}" for key in changed),
            limit=", ".join(f"{key} = {manifest.config[key]}" for key in changed),
            remedy="Resume with the same values, or start a new run.",
        )
    if manifest.corpus != corpus_fingerprint:
        raise InputError(
            "the corpus differs from the one the run was started with",
            value=recipe.corpus_path,
            remedy="Resume with the same corpus, or start a new run.",
        )


def check_nothing_to_resume(checkpoints: Checkpoints) -> None:
    """Refuse to start a run where an earlier one of its name left checkpoints.

    They need not be in the run directory, so a new `storage_path` does not make them go away; and
    workers that hold nothing take the newest one, whoever wrote it.

    Raises:
        InputError: there are checkpoints.
        CheckpointError: the storage cannot be read.
    """
    steps = checkpoints.steps()
    if steps:
        raise InputError(
            "checkpoints of a run of this name exist, which a new run would go on from",
            value=checkpoints.folder(steps[-1]),
            remedy="Go on with --resume and that run's storage_path, or choose another --run-name.",
        )


def _check_tensor_ranks(then: int, now: int) -> None:
    """Split weights are stored by their parts; every other axis may change."""
    if then != now:
        raise InputError(
            "a checkpoint goes on with the tensor-parallel size it was made with only",
            value=f"parallel.tensor = {now}",
            limit=f"parallel.tensor = {then}",
            remedy="Set it back; workers, pipeline, chunks and expert may change.",
        )
