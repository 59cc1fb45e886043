"""A recipe is read exactly, or refused by key with what would be right."""

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from hydra_ray.config import Recipe, dump_recipe, load_recipe
from hydra_ray.config.reference import recipe_reference
from hydra_ray.config.sections import ModelSection, OptimizerSection, ParallelSection
from planner.cost import CostModel
from planner.errors import InputError
from planner.presets import DENSE, MLA
from workers.protocol import ModelSpec, TrainingSpec

JOBS = Path(__file__).parents[2] / "jobs"
RECIPES = sorted(JOBS.glob("*.yaml"))
MINIMAL = {
    "steps": 10,
    "context": 1024,
    "token_budget": 512,
    "global_batch_tokens": 4096,
    "workers": 4,
    "data": {"corpus": "corpus.parquet"},
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_heads": 8,
        "num_kv_heads": 2,
    },
}
MLA_MODEL = [
    "model.attention=mla",
    "model.num_kv_heads=8",
    "model.kv_lora_rank=32",
    "model.qk_head_dim=16",
    "model.qk_rope_dim=8",
    "model.v_head_dim=12",
]


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as error:
        load_recipe(path, overrides)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_loads_and_resolves(path: Path) -> None:
    recipe = load_recipe(path)
    ranks = recipe.num_ranks(recipe.workers)
    pool = recipe.pool_shape(ranks)
    assert recipe.context <= pool.longest_sequence, "its longest document would not fit"
    assert recipe.global_batch_tokens >= recipe.context
    assert recipe.cost_model().table(pool).degrees[-1] <= ranks
    assert recipe.model_spec(257).context == recipe.context
    assert recipe.training_spec().lr > 0


def test_the_quickstart_runs_four_workers_on_two_cores() -> None:
    recipe = load_recipe(JOBS / "quickstart.yaml")
    assert recipe.workers == 4
    assert recipe.workers * recipe.cpus_per_worker <= 2
    assert recipe.steps >= 40


def test_overrides_are_read_as_yaml_in_order(recipe_path: Path) -> None:
    recipe = load_recipe(
        recipe_path,
        ["steps=7", "steps=8", "optimizer.lr=1e-2", "cp_comm=[2, 1]", "checkpoint.every_steps=5"],
    )
    assert (recipe.steps, recipe.optimizer.lr, recipe.cp_comm) == (8, 0.01, (2, 1))
    assert recipe.checkpoint.every_steps == 5
    assert load_recipe(recipe_path, ["trace=true"]).trace is True


def test_resolved_recipe_reads_back_equal(recipe_path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_path, ["cp_comm=[2, 2]", "elastic.max=8", "cost.preset=moe"])
    copy = tmp_path / "config.yaml"
    copy.write_text(dump_recipe(recipe))
    assert load_recipe(copy) == recipe


@pytest.mark.parametrize(
    ("override", "key", "suggested"),
    [
        ("stpes=3", "stpes", "steps"),
        ("token_buget=3", "token_buget", "token_budget"),
        ("model.num_head=4", "model.num_head", "model.num_heads"),
        ("checkpoint.evry_steps=4", "checkpoint.evry_steps", "checkpoint.every_steps"),
        ("num_layers=4", "num_layers", "model.num_layers"),
        ("elastic.max_failure=4", "elastic.max_failure", "elastic.max_failures"),
    ],
)
def test_unknown_keys_are_refused_with_a_suggestion(
    recipe_path: Path, override: str, key: str, suggested: str
) -> None:
    text = refusal(recipe_path, override)
    assert f"unknown config key; got {key}." in text
    assert f"Did you mean {suggested}?" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("token_budget=0", ("token_budget", "got 0", ">= 1")),
        ("steps=-1", ("steps", "got -1", ">= 1")),
        ("workers=0", ("workers", "got 0", ">= 1")),
        ("steps=true", ("steps", "got True")),
        ("gpus_per_worker=0.5", ("gpus_per_worker", "0 or a whole number >= 1", "got 0.5")),
        ("gpus_per_worker=1.5", ("gpus_per_worker", "got 1.5")),
        ("steps=1.5", ("steps", "got 1.5")),
        ("dtype=float16", ("dtype", "'float16'", "'bfloat16'")),
        ("cp_comm=rings", ("cp_comm", "'rings'", "[u, r]")),
        ("cp_comm=[2, 0]", ("cp_comm", "[2, 0]")),
        ("optimizer.lr=.nan", ("optimizer.lr", "finite")),
        ("model.num_kv_heads=3", ("num_heads (8)", "num_kv_heads (3)")),
        ("model.hidden_size=60", ("hidden_size (60)", "num_heads (8)")),
        ("model.attention=mla", ("kv_lora_rank", "v_head_dim")),
        ("model.num_experts=4", ("expert_ffn_hidden_size",)),
        ("parallel.chunks=2", ("pipeline above 1",)),
        ("parallel.pipeline=4", ("pipeline x chunks (4)", "num_layers (2)")),
        ("parallel.expert=2", ("parallel.expert (2)", "num_experts (0)")),
        ("elastic.max=3", ("workers (4)", "1..3")),
        ("elastic.min=5", ("workers (4)", "5..")),
        ("optimizer.distributed_optimizer=true", ("max_failures (8) must be 0", "--resume")),
        ("data.corpus=null", ("corpus", "sources")),
        ("name=a/b", ("name", "'a/b'")),
        ("steps", ("key=value", "got steps")),
        ("steps.x=1", ("steps is a value", "steps=VALUE")),
        ("steps=[", ("not valid YAML",)),
    ],
)
def test_bad_values_are_refused_with_value_and_limit(
    recipe_path: Path, override: str, words: tuple[str, ...]
) -> None:
    text = refusal(recipe_path, override)
    assert all(word in text for word in words), text


def test_pools_that_are_no_multiple_of_the_unit_name_the_nearest(recipe_path: Path) -> None:
    text = refusal(recipe_path, "parallel.tensor=2", "parallel.pipeline=2", "workers=6")
    assert "workers (6)" in text
    assert "4 or 8" in text
    assert "elastic.max (5)" in refusal(recipe_path, "parallel.tensor=2", "elastic.max=5")
    recipe = load_recipe(recipe_path, ["parallel.tensor=2", "workers=8"])
    assert recipe.num_ranks(8) == 4
    with pytest.raises(InputError, match=r"whole scale units.*Use 6 or 8"):
        recipe.num_ranks(7)


def test_several_mistakes_are_all_named(recipe_path: Path) -> None:
    text = refusal(recipe_path, "steps=0", "dtype=int8", "optimiser.lr=3")
    assert all(key in text for key in ("steps", "dtype", "optimiser"))


def test_files_that_are_no_recipe_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    assert "cannot be read" in refusal(path)
    for text, words in {
        "a: [": "not valid YAML",
        "- 1": "a mapping",
        "": "a mapping",
        "steps: 1\nsteps: 2": "given twice",
        "model: {num_layers: 1, num_layers: 2}": "given twice",
    }.items():
        path.write_text(text)
        assert words in refusal(path)


def test_missing_keys_are_named(recipe_path: Path) -> None:
    settings = {key: value for key, value in MINIMAL.items() if key != "token_budget"}
    recipe_path.write_text(yaml.safe_dump(settings))
    assert "Add token_budget" in refusal(recipe_path)


@pytest.mark.parametrize(
    ("spec", "sections", "elsewhere"),
    [
        (ModelSpec, [ModelSection], {"vocab_size", "context"}),
        (TrainingSpec, [OptimizerSection, ParallelSection], {"optimizer"}),
    ],
)
def test_the_recipe_reaches_every_field_of_the_workers_types(
    spec: type, sections: list[type[BaseModel]], elsewhere: set[str]
) -> None:
    reachable = elsewhere | set(Recipe.model_fields)
    for section in sections:
        reachable |= set(section.model_fields)
        assert set(section.model_fields) - {"name"} <= {field.name for field in fields(spec)}
    assert {field.name for field in fields(spec)} <= reachable


def test_conversions_carry_the_values(recipe_path: Path) -> None:
    recipe = load_recipe(
        recipe_path,
        ["parallel.tensor=2", "parallel.sequence_parallel=true", "optimizer.name=sgd", "seed=5"],
    )
    pool = recipe.pool_shape(2)
    assert (pool.num_ranks, pool.token_budget, pool.pad_unit) == (2, 512, 4)
    spec = recipe.training_spec()
    assert (spec.optimizer, spec.tensor, spec.sequence_parallel, spec.seed) == ("sgd", 2, True, 5)
    model = recipe.model_spec(257)
    assert (model.vocab_size, model.context, model.num_kv_heads) == (258, 1024, 2)


def test_pools_use_only_degrees_that_the_heads_can_be_cut_by(recipe_path: Path) -> None:
    assert load_recipe(recipe_path).pool_shape(12).degrees == (1, 2, 4, 8, 12)
    ulysses = load_recipe(recipe_path, ["cp_comm=ulysses"])
    assert ulysses.pool_shape(12).degrees == (1, 2, 4, 8)
    assert ulysses.pool_shape(3).degrees == (1, 2)
    assert load_recipe(recipe_path, ["cp_comm=[2, 2]"]).pool_shape(12).degrees == (1, 2, 4)
    for ranks in range(1, 17):
        for split in ("auto", "ulysses", "ring", "[2, 3]"):
            recipe = load_recipe(recipe_path, [f"cp_comm={split}"])
            recipe.cost_model().table(recipe.pool_shape(ranks))


def test_cost_follows_the_model_and_given_coefficients_win(recipe_path: Path) -> None:
    cost = load_recipe(recipe_path).cost_model()
    deeper = load_recipe(recipe_path, ["model.num_layers=4"]).cost_model()
    assert deeper.quadratic_s == pytest.approx(2 * cost.quadratic_s)
    assert deeper.linear_s == pytest.approx(2 * cost.linear_s)
    assert cost.quadratic_s < DENSE.quadratic_s
    assert (cost.attention.qk_dim, cost.attention.bytes_per_element) == (8, 4)
    given = load_recipe(recipe_path, ["cost.preset=mla", "cost.linear_s=0.5", *MLA_MODEL])
    assert given.cost_model().linear_s == 0.5
    assert given.cost_model().quadratic_s == MLA.quadratic_s
    shape = given.cost_model().attention
    assert (shape.num_kv_heads, shape.qk_dim, shape.v_dim) == (8, 24, 12)


def test_the_dense_model_of_the_defaults_gets_the_defaults(recipe_path: Path) -> None:
    llama = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_heads": 32,
        "num_kv_heads": 8,
    }
    settings = {**MINIMAL, "model": llama, "parallel": {"pipeline": 4}, "dtype": "bfloat16"}
    recipe_path.write_text(yaml.safe_dump(settings))
    cost = load_recipe(recipe_path).cost_model()
    defaults = CostModel()
    assert cost.attention == defaults.attention
    assert cost.quadratic_s == pytest.approx(defaults.quadratic_s)
    assert cost.linear_s == pytest.approx(defaults.linear_s, rel=0.01)


def test_an_unnamed_corpus_is_kept_apart_by_what_decides_it(recipe_path: Path) -> None:
    source = ["data.corpus=null", "data.sources=[python-stdlib]"]
    paths = {
        load_recipe(recipe_path, [*source, *more]).corpus_path
        for more in ([], ["context=2048"], ["data.on_too_long=drop"], ["storage_path=elsewhere"])
    }
    assert len(paths) == 4
    assert (
        load_recipe(recipe_path, source).corpus_path
        == load_recipe(recipe_path, [*source, "steps=3"]).corpus_path
    )


def test_every_key_is_documented() -> None:
    page = (JOBS.parent / "docs" / "recipe.md").read_text()
    assert page == recipe_reference(), (
        "python -m hydra_ray.config.reference > docs/recipe.md brings the page up to date"
    )
    assert "|  |" not in page, "a key has no description"
