"""The run directory: where a run writes what it was told, what it did, and how it can go on.

    <storage_path>/<run>/
        config.yaml       the resolved recipe
        steps.jsonl       one line a step
        events.jsonl      one line a change: membership, checkpoints, state, errors
        run.log           the driver's log
        trace.json        Chrome trace slices of every step, when tracing; Perfetto opens it
        endpoint.json     where the live driver answers
        checkpoints/      step_000020/ each, valid once it holds manifest.json

Only the driver writes here, so nothing is locked.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.errors import InputError

CONFIG, STEPS, EVENTS = "config.yaml", "steps.jsonl", "events.jsonl"
LOG, TRACE, ENDPOINT = "run.log", "trace.json", "endpoint.json"
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a live run answers: a named actor on a Ray cluster.

    `local_pid` is the process that embeds the cluster, or None for a job on a cluster;
    `auth_mode` is the cluster's RAY_AUTH_MODE where it has one (the token itself is Ray's matter).
    """

    run: str
    ray_address: str
    dashboard_url: str
    local_pid: int | None = None
    auth_mode: str | None = None


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one run."""

    root: Path

    @property
    def checkpoints(self) -> str:
        """The default folder of checkpoints."""
        return str(self.root / "checkpoints")

    @property
    def log(self) -> Path:
        """The driver's log."""
        return self.root / LOG

    def exists(self) -> bool:
        """Whether a run of this name was ever started."""
        return (self.root / CONFIG).exists()

    def create(self, config: str) -> None:
        """Make the directory and write the resolved recipe."""
        self.root.mkdir(parents=True, exist_ok=True)
        write_atomically(self.root / CONFIG, config)

    def config(self) -> str:
        """The resolved recipe, as YAML."""
        return (self.root / CONFIG).read_text(encoding="utf-8")

    def append_step(self, record: dict[str, Any]) -> None:
        """Add one line to steps.jsonl."""
        append_line(self.root / STEPS, record)

    def append_event(self, event: str, **facts: Any) -> dict[str, Any]:
        """Add one line to events.jsonl, stamped with the wall clock; returns it."""
        record = {"time": time.time(), "event": event, **facts}
        append_line(self.root / EVENTS, record)
        return record

    def append_trace(self, slices: Iterable[dict[str, Any]]) -> None:
        """Add slices to trace.json: a JSON array whose end the trace format lets us leave open."""
        lines = "".join(json.dumps(entry) + ",\n" for entry in slices)
        if lines:
            path = self.root / TRACE
            with path.open("a", encoding="utf-8") as file:
                file.write(lines if file.tell() else "[\n" + lines)

    def steps(self) -> list[dict[str, Any]]:
        """Every line of steps.jsonl."""
        return list(read_lines(self.root / STEPS))

    def events(self) -> list[dict[str, Any]]:
        """Every line of events.jsonl."""
        return list(read_lines(self.root / EVENTS))

    def cut_steps(self, last: int) -> int:
        """Drop the lines of steps after `last`, so that redone steps stand once; returns how many.

        A last line that a crash left half written is dropped too.
        """
        records = self.steps()
        kept = [record for record in records if record["step"] <= last]
        lines = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.root / STEPS, lines)
        return len(records) - len(kept)

    def write_endpoint(self, endpoint: Endpoint) -> None:
        """Say where the run answers."""
        write_atomically(self.root / ENDPOINT, json.dumps(asdict(endpoint)) + "\n")

    def endpoint(self) -> Endpoint | None:
        """Where the run answers, or None once it has ended well."""
        try:
            text = (self.root / ENDPOINT).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return Endpoint(**json.loads(text))

    def clear_endpoint(self) -> None:
        """The run answers no more."""
        (self.root / ENDPOINT).unlink(missing_ok=True)


def run_directory(storage_path: str, run: str) -> RunDirectory:
    """The directory of `run`, as an absolute path.

    Raises:
        InputError: no run can have this name.
    """
    if not RUN_NAME.fullmatch(run):
        raise InputError(
            "this is no name of a run",
            value=run,
            limit="at most 64 letters, digits, dots, dashes, underscores; first a letter or digit",
        )
    return RunDirectory(Path(storage_path).expanduser().resolve() / run)


def find_runs(storage_path: str) -> list[RunDirectory]:
    """Every run under `storage_path`, by name."""
    root = Path(storage_path).expanduser().resolve()
    return [RunDirectory(path.parent) for path in sorted(root.glob(f"*/{CONFIG}"))]


def check_name_is_free(directory: RunDirectory, *, resume: bool) -> None:
    """Refuse to write into another run, or to resume one that never was or still runs here.

    Raises:
        InputError: the name is taken and `resume` is off, or the other way round; or a living
            process of this machine trains the run.
    """
    if directory.exists() and not resume:
        raise InputError(
            "a run of this name exists",
            value=str(directory.root),
            remedy="Continue it with --resume, or choose another --run-name.",
        )
    if resume and not directory.exists():
        raise InputError(
            "there is no such run to resume",
            value=str(directory.root),
            remedy="Start it without --resume, or check --run-name and storage_path.",
        )
    check_is_not_running(directory)


def check_is_not_running(directory: RunDirectory) -> None:
    """Refuse a run that a living process of this machine trains: two would write one directory.

    Raises:
        InputError: it does.
    """
    endpoint = directory.endpoint()
    pid = endpoint.local_pid if endpoint is not None else None
    if pid is not None and pid != os.getpid() and is_alive(pid):
        raise InputError(
            "the run is still running",
            value=f"process {pid}",
            remedy="Stop it, or wait for its end; then continue it with --resume.",
        )


def is_alive(pid: int) -> bool:
    """Whether a process of this machine lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader sees the old text or the new, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add one JSON line with a single write, seen by readers at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file; none if it is absent; a half-written last line is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def last(records: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The last record whose fields equal `wanted`."""
    found = None
    for record in records:
        if all(record.get(name) == value for name, value in wanted.items()):
            found = record
    return found
