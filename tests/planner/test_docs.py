"""What docs/planner.md shows from a notebook works as it stands, from one import."""

import re
from pathlib import Path

import pytest

import planner

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def test_the_first_snippet_plans_and_prints(capsys):
    snippet = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    exec(compile(snippet, str(PAGE), "exec"), {})  # noqa: S102 our own page
    printed = capsys.readouterr().out
    assert "PlanSummary(planner='hydra-opt'" in printed
    assert "[262144]" in printed


@pytest.mark.parametrize("name", planner.__all__)
def test_every_public_name_is_found_and_is_no_module(name):
    modules = {path.stem for path in Path(planner.__file__).parent.glob("*.py")}
    assert getattr(planner, name).__module__.startswith("planner.")
    assert name not in modules


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="plans"):
        _ = planner.plans
