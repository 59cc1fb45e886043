"""Commands about runs: list, status, events, logs, scale, checkpoint, stop."""

import time
from typing import Annotated, Any

import typer

from hydra_ray.cli.output import JsonFlag, say, say_json, say_table
from hydra_ray.cli.training_display import describe_event

RunArgument = Annotated[str, typer.Argument(help="The run's name.")]
StorageOption = Annotated[str, typer.Option("--storage-path", help="Folder of run directories.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Ray cluster (host:port); default: the run's own.")
]

LOOK_EVERY_S = 0.2
ENDED = frozenset({"finished", "stopped", "failed"})
STANDING = frozenset({"running", "saving", "finished"})  # states whose `num_workers` is at work


def list_runs(storage_path: StorageOption = "runs", as_json: JsonFlag = False) -> None:
    """List the runs under the storage path, with what each is doing."""
    from hydra_ray.rundir import find_runs

    for directory in find_runs(storage_path):
        facts = _offline_status(directory)
        if as_json:
            say_json(facts)
        else:
            say(f"{facts['run']:<24} {facts['state']:<12} step {facts['step']}")


def status(
    run: RunArgument,
    storage_path: StorageOption = "runs",
    address: AddressOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what a run is doing; of an ended run, how it ended."""
    facts = _status(run, storage_path, address)
    if as_json:
        say_json(facts)
    else:
        step = facts.pop("last_step", None) or {}
        say_table({**facts, **{f"last {name}": value for name, value in step.items()}})


def events(
    run: RunArgument, storage_path: StorageOption = "runs", as_json: JsonFlag = False
) -> None:
    """Show every change of a run: membership with cause and pause, checkpoints, errors."""
    for event in _directory(run, storage_path).events():
        if as_json:
            say_json(event)
        else:
            clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
            say(f"{clock}  {describe_event(event)}")


def logs(run: RunArgument, storage_path: StorageOption = "runs", as_json: JsonFlag = False) -> None:
    """Print the driver's log of a run."""
    path = _directory(run, storage_path).log
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if as_json:
        say_json({"run": run, "lines": text.splitlines()})
    elif text:
        say(text.rstrip())


def scale(
    run: RunArgument,
    num_workers: Annotated[int, typer.Argument(metavar="N", help="Workers wanted.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return once the run has them.")] = False,
    timeout_s: Annotated[float, typer.Option(help="How long --wait waits.")] = 300.0,
    storage_path: StorageOption = "runs",
    address: AddressOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Change the number of workers of a running job; applied at a step boundary.

    With --wait, exit code 1 says that the run did not get there: it gave the request up, ended, or
    the time was up.
    """
    from hydra_ray.cli.connect import connected_driver

    with connected_driver(run, storage_path, address) as driver:
        operation = _answer(driver.scale.remote(num_workers))
        reached = None
        if wait:
            reached = _wait_for_workers(
                lambda: _answer(driver.status.remote()), num_workers, timeout_s
            )
    facts = {"run": run, "operation": operation, "workers": num_workers, "reached": reached}
    if as_json:
        say_json(facts)
    else:
        became = {None: "asked for", True: "reached", False: "not reached; see its events"}[reached]
        say(f"{run}: {num_workers} workers {became}")
    if reached is False:
        raise typer.Exit(1)


def drain(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="WORKER|NODE", help="As `status` shows them.")],
    storage_path: StorageOption = "runs",
    address: AddressOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Take a worker, or all workers of a node, out of a run for good; others take their place."""
    from hydra_ray.cli.connect import connected_driver

    with connected_driver(run, storage_path, address) as driver:
        workers = _answer(driver.drain.remote(name))
    if as_json:
        say_json({"run": run, "leaving": workers})
    else:
        named = f"workers {', '.join(map(str, workers))}" if workers else "no loaded worker"
        say(f"{run}: {named} will leave")


def checkpoint(
    run: RunArgument,
    storage_path: StorageOption = "runs",
    address: AddressOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Have a run write a checkpoint at its next step boundary."""
    from hydra_ray.cli.connect import connected_driver

    with connected_driver(run, storage_path, address) as driver:
        _answer(driver.save.remote())
    if as_json:
        say_json({"run": run, "checkpoint": "asked for"})
    else:
        say(f"{run}: checkpoint asked for")


def stop(
    run: RunArgument,
    storage_path: StorageOption = "runs",
    address: AddressOption = None,
    timeout_s: Annotated[float, typer.Option(help="How long to wait for its end.")] = 300.0,
    as_json: JsonFlag = False,
) -> None:
    """End a run after the step in hand, with a checkpoint, and wait for its end."""
    from hydra_ray.cli.connect import connected_driver
    from hydra_ray.rundir import run_directory

    with connected_driver(run, storage_path, address) as driver:
        _answer(driver.stop.remote())
    # The cluster may end with the run, so its end is seen in the run directory, not over Ray.
    directory = run_directory(storage_path, run)
    state = _wait_for_end(directory, timeout_s) if directory.exists() else "stopping"
    if as_json:
        say_json({"run": run, "state": state})
    else:
        say(f"{run}: {state}")


def _answer(ref: Any) -> Any:
    from hydra_ray.launch import answer  # after `connected_driver`, which prepares Ray's import

    return answer(ref)


def _directory(run: str, storage_path: str) -> Any:
    from hydra_ray.driver.errors import RunNotFoundError
    from hydra_ray.rundir import find_runs, run_directory

    directory = run_directory(storage_path, run)
    if not directory.exists():
        names = ", ".join(found.root.name for found in find_runs(storage_path)) or "none"
        raise RunNotFoundError(
            "there is no such run", value=str(directory.root), remedy=f"Runs there: {names}."
        )
    return directory


def _status(run: str, storage_path: str, address: str | None) -> dict[str, Any]:
    from hydra_ray.cli.connect import connected_driver, live_address
    from hydra_ray.rundir import run_directory

    if address is None and live_address(run_directory(storage_path, run)) is None:
        return _offline_status(_directory(run, storage_path))
    with connected_driver(run, storage_path, address) as driver:
        facts: dict[str, Any] = _answer(driver.status.remote())
        return facts


def _offline_status(directory: Any) -> dict[str, Any]:
    """What the run directory says: the last state, and whether its process is still there."""
    from hydra_ray.cli.connect import live_address
    from hydra_ray.rundir import last

    steps = directory.steps()
    state = last(directory.events(), event="state") or {"state": "starting"}
    alive = live_address(directory) is not None
    ended = state["state"] in ENDED
    return {
        "run": directory.root.name,
        "state": state["state"] if alive or ended else "died",
        "step": steps[-1]["step"] if steps else 0,
        "error": state.get("error"),
        "run_dir": str(directory.root),
    }


def _wait_for_end(directory: Any, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while directory.endpoint() is not None and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return str(_offline_status(directory)["state"])


def _wait_for_workers(ask: Any, num_workers: int, timeout_s: float) -> bool:
    """Whether the run has `num_workers` within the time, before it gives them up or ends."""
    from hydra_ray.driver.errors import DriverLostError

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            facts = ask()
        except DriverLostError:  # the run has ended, and its cluster with it
            return False
        if facts.get("num_workers") == num_workers and facts["state"] in STANDING:
            return True
        if facts["target_workers"] != num_workers or facts["state"] in ENDED:
            return False
        time.sleep(LOOK_EVERY_S)
    return False
