"""What must hold before a run may start. Nothing is written until all of it holds."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hydra_ray.config import Recipe
from hydra_ray.data.index import SequenceIndex
from hydra_ray.data.prepare import CorpusSummary, prepare_corpus
from hydra_ray.data.tokenise import PrepareOptions
from hydra_ray.data.tokenizer import BYTES, load_tokenizer
from planner.errors import InfeasibleError, InputError
from planner.registry import get_planner

# A pool uses at least half its ranks for one sequence unless something caps its degree, so one
# with this many times the room of a sequence that it does not hold never will.
MOST_POOL_ROOM = 4


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def check_recipe(recipe: Recipe) -> None:
    """What the recipe's own types cannot see.

    Raises:
        InputError: no such planner, or heads and degrees that no split fits.
    """
    get_planner(recipe.planner)
    recipe.cost_model().table(recipe.pool_shape(recipe.num_ranks(recipe.workers)))


def check_machine(recipe: Recipe, *, num_cpus: float, num_gpus: float) -> None:
    """Whether the workers and standbys fit the machine or the cluster.

    Args:
        recipe: says how many workers there are and what each claims.
        num_cpus: cores there are: `usable_cores()` here, Ray's total on a cluster.
        num_gpus: GPUs there are.

    Raises:
        InputError: they do not fit.
    """
    processes = recipe.workers + recipe.elastic.standbys
    claims = (
        ("CPU core", recipe.cpus_per_worker, num_cpus, "lower cpus_per_worker: workers can share"),
        ("GPU", recipe.gpus_per_worker, num_gpus, "set gpus_per_worker=0 to train without"),
    )
    for resource, each, available, instead in claims:
        if each * processes > available:
            raise InputError(
                f"the workers need more {resource}s than there are",
                value=f"{processes} workers x {each:g} {resource}s = {each * processes:g}",
                limit=f"{available:g} {resource}s, which is {int(available / each)} workers",
                remedy=f"Lower workers, or {instead}.",
            )


def check_cluster(recipe: Recipe, resources: Mapping[str, float]) -> None:
    """Whether the workers and standbys fit a cluster of these resources, by Ray's names.

    Raises:
        InputError: they do not fit, so that some would wait for a place for ever.
    """
    try:
        check_machine(
            recipe, num_cpus=resources.get("CPU", 0.0), num_gpus=resources.get("GPU", 0.0)
        )
    except InputError as error:
        raise InputError(
            error.what,
            value=error.value,
            limit=f"{error.limit} on this cluster",
            remedy=f"{error.remedy} Where nodes are still to come, set elastic.follow_cluster.",
        ) from error


def open_corpus(
    recipe: Recipe, *, on_progress: Callable[[CorpusSummary], None] | None = None
) -> SequenceIndex:
    """Open the recipe's corpus; where it names none, prepare one from its sources, once.

    Call it after the other checks: preparing writes a file.

    Raises:
        InputError: there is no corpus and no source, or either cannot be used.
    """
    path = recipe.corpus_path
    if recipe.data.corpus is None and "://" not in path and not Path(path).exists():
        options = PrepareOptions(
            context=recipe.context,
            tokenizer=recipe.data.tokenizer,
            text_column=recipe.data.text_column,
            on_too_long=recipe.data.on_too_long,
        )
        processes = usable_cores()
        prepare_corpus(
            recipe.data.sources, path, options, processes=processes, on_progress=on_progress
        )
    return SequenceIndex(path)


def check_corpus(recipe: Recipe, index: SequenceIndex) -> None:
    """Whether every sequence fits the model's context and the pool.

    Raises:
        InputError: a sequence is longer than the context, or the recipe names a tokenizer that
            is not the corpus's.
        InfeasibleError: a sequence is longer than the pool holds, at the start or at
            `elastic.min` workers.
    """
    _check_tokenizer(recipe, index)
    row = int(index.lengths.argmax())
    longest, named = int(index.lengths[row]), f"sequence {index.ids[row]}"
    if longest > recipe.context:
        raise InputError(
            "the corpus holds a sequence longer than the context",
            value=f"{named} of {longest} tokens",
            limit=f"context {recipe.context}",
            remedy=f"Prepare the corpus with --context {recipe.context}, or raise context.",
        )
    for workers, where in ((recipe.workers, "workers"), (recipe.elastic.min, "elastic.min")):
        if workers is not None:
            _check_pool_holds(recipe, workers, where, longest, named)


def _check_tokenizer(recipe: Recipe, index: SequenceIndex) -> None:
    """The corpus decides; a tokenizer file named beside it must be the one that made it."""
    if recipe.data.tokenizer == BYTES:
        return
    if load_tokenizer(recipe.data.tokenizer).digest != index.info.tokenizer_digest:
        raise InputError(
            "the corpus was made with another tokenizer",
            value=recipe.data.tokenizer,
            limit=index.info.tokenizer,
            remedy="Remove data.tokenizer, or prepare the corpus with it.",
        )


def _check_pool_holds(recipe: Recipe, workers: int, where: str, longest: int, named: str) -> None:
    pool = recipe.pool_shape(recipe.num_ranks(workers))
    if longest <= pool.longest_sequence:
        return
    raise InfeasibleError(
        "the corpus holds a sequence longer than the pool can hold",
        value=f"{named} of {longest} tokens",
        limit=f"CP degree {pool.degrees[-1]} x token_budget {recipe.token_budget} = "
        f"{pool.longest_sequence} tokens at {where} {workers}",
        remedy="Raise token_budget or the number of workers, or prepare the corpus with a "
        "smaller --context.",
    )


def smallest_pool(recipe: Recipe, longest: int) -> int:
    """The fewest workers that can train: `elastic.min`, or what the longest sequence needs.

    Raises:
        InfeasibleError: no pool holds it, since max_degree bounds its CP degree.
    """
    if recipe.elastic.min is not None:
        return recipe.elastic.min
    workers = recipe.parallel.scale_unit
    while not _holds(recipe, workers, longest):
        if recipe.num_ranks(workers) * recipe.token_budget > MOST_POOL_ROOM * longest:
            raise InfeasibleError(
                "no pool holds the longest sequence",
                value=f"{longest} tokens",
                limit=f"max_degree {recipe.max_degree or 'none'}, cp_comm {recipe.cp_comm}, "
                f"token_budget {recipe.token_budget}",
                remedy="Raise token_budget or max_degree, or use cp_comm auto.",
            )
        workers += recipe.parallel.scale_unit
    return workers


def check_size(recipe: Recipe, num_workers: int, longest: int) -> None:
    """Whether a live run may have this many workers.

    Args:
        recipe: says the bounds.
        num_workers: the workers asked for.
        longest: tokens of the corpus's longest sequence.

    Raises:
        InputError: they make no whole scale units, or too few or too many of them.
    """
    if num_workers > 0:
        recipe.num_ranks(num_workers)
    low, high = smallest_pool(recipe, longest), recipe.elastic.max
    needed_by = "elastic.min"
    if recipe.elastic.min is None:
        needed_by = (
            f"the longest sequence of {longest} tokens at token_budget {recipe.token_budget}"
        )
    if num_workers < low:
        raise InputError(
            "the run cannot train with so few workers",
            value=num_workers,
            limit=f">= {low} workers for {needed_by}",
            remedy=f"Ask for {low} or more.",
        )
    if high is not None and num_workers > high:
        raise InputError(
            "the number of workers is above the recipe's bound",
            value=num_workers,
            limit=f"elastic.max {high}",
            remedy=f"Ask for {high} or fewer.",
        )


def _holds(recipe: Recipe, workers: int, longest: int) -> bool:
    return recipe.pool_shape(recipe.num_ranks(workers)).longest_sequence >= longest
