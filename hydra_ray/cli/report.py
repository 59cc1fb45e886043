"""`hydra-ray report`: one HTML page with the plots of a run."""

from pathlib import Path
from typing import Annotated

import typer

from hydra_ray.cli.output import JsonFlag, say, say_json


def report(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, such as runs/quickstart.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run's directory.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Draw a run, finished or not, into one self-contained HTML page."""
    from hydra_ray.report.page import write_report

    page = out or run_dir / "report.html"
    figures = write_report(run_dir, page)
    if as_json:
        say_json({**figures, "report": str(page)})
    else:
        say(f"{page}: {figures['steps']} steps of {figures['run']}, {figures['state']}")
