"""The `hydra-ray` command: registers the commands, turns errors into messages and exit codes.

Exit codes: 0 done, 1 failed, 2 the input is wrong and nothing was changed, 130 interrupted
(Typer turns Ctrl-C and mistakes of usage into theirs).
Command modules import Ray, pyarrow and the like inside their functions, so that `--help` and
mistakes answer at once.
"""

import sys

import typer

from hydra_ray.cli import control
from hydra_ray.cli.doctor import doctor
from hydra_ray.cli.output import say_error
from hydra_ray.cli.plan import plan
from hydra_ray.cli.prepare import prepare
from hydra_ray.cli.report import report
from hydra_ray.cli.submit import submit
from hydra_ray.cli.train import train
from planner.errors import HydraError

app = typer.Typer(
    name="hydra-ray",
    help="Elastic training of Megatron models on Ray with dynamic context parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _frame() -> None:
    """Elastic training of Megatron models on Ray with dynamic context parallelism."""


app.command()(prepare)
app.command()(doctor)
app.command()(report)
app.command()(plan)
app.command()(train)
app.command()(submit)
app.command(name="list")(control.list_runs)
for command in (
    control.status,
    control.events,
    control.logs,
    control.scale,
    control.drain,
    control.checkpoint,
    control.stop,
):
    app.command()(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        app(arguments, prog_name="hydra-ray")
    except HydraError as error:
        say_error(error, as_json="--json" in arguments)
        return error.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
