"""What docs/planner.md shows from a notebook works as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def test_the_first_snippet_plans_and_prints(capsys):
    snippet = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    exec(compile(snippet, str(PAGE), "exec"), {})  # noqa: S102 our own page
    printed = capsys.readouterr().out
    assert "PlanSummary(planner='hydra-opt'" in printed
    assert "[262144]" in printed
