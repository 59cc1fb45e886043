"""The `hydra-ray` command: registers the commands, turns errors into messages and exit codes.

Exit codes: 0 done, 1 failed, 2 the input is wrong and nothing was changed, 130 interrupted.
Command modules import Ray, pyarrow and the like inside their functions, so that `--help` and
mistakes answer at once.
"""

import sys

import click
import typer

from hydra_ray.cli.output import say_error
from planner.errors import HydraError

INTERRUPTED = 130

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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments, prog_name="hydra-ray", standalone_mode=False)
    except HydraError as error:
        say_error(error, as_json="--json" in arguments)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return result if isinstance(result, int) else 0
