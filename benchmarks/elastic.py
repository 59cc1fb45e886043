"""`python -m benchmarks.elastic [--json] [--out FILE]`: what changes of the workers cost.

Run from the checkout, on an idle machine; under 12 minutes on 2 cores. One object a line with
--json: {"figure", "value", "unit", "values"}; a value is the median of its values. Our figures
come from the run's own records: steps.jsonl and events.jsonl; see elastic_rival.py for Ray Train's.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from benchmarks.elastic_rival import rival_rows
from benchmarks.elastic_run import ElasticRun, elastic_run, write_corpus
from benchmarks.machine import machine
from benchmarks.stub_runtime import stub_runtime

Row = dict[str, Any]
STUB_POOLS = (4, 16, 64)
LONG_PLAN_TOKENS = 4_500_000
ASKED_WHILE_PLANNING, ASKED_EVERY_S = 1_000, 0.02


def main() -> None:
    """Measure, print as it goes, and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--out", type=Path, help="also record the JSON lines in this file")
    parser.add_argument("--repeats", type=int, default=10, help="of each change")
    options = parser.parse_args()
    lines = []
    with TemporaryDirectory(prefix="hyb") as folder:
        for row in rows(Path(folder), options.repeats):
            lines.append(json.dumps(row))
            print(lines[-1] if options.json else _text(row), flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def rows(folder: Path, repeats: int) -> Iterator[Row]:
    """All figures, the machine first."""
    yield {"figure": "machine", "value": None, **machine(), "ray": ray.__version__}
    write_corpus(folder / "corpus.parquet")
    ray.init(
        address="local",
        namespace="hydra",
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=16,
        _temp_dir=str(folder / "ray"),
    )
    try:
        with elastic_run(folder, "changes", num_workers=4, standbys=1) as run:
            yield from change_rows(run, repeats)
        for num_workers in STUB_POOLS:
            name = f"stub-{num_workers}"
            with elastic_run(
                folder, name, num_workers=num_workers, make_runtime=stub_runtime
            ) as run:
                run.steps(50)
            yield figure(f"driver_overhead_{num_workers}_stubs_s", overheads(run)[10:])
        yield from planning_rows(folder)
    finally:
        ray.shutdown()
    yield from rival_rows(folder)


def change_rows(run: ElasticRun, repeats: int) -> Iterator[Row]:
    """A run of four workers and a standby that is killed, shrunk, grown and asked."""
    run.steps(30)
    undisturbed = run.directory.steps()[5:]
    normal_s = median(step["wall_s"] for step in undisturbed)
    yield figure("step_s", [step["wall_s"] for step in undisturbed])
    yield figure("driver_overhead_s", overheads(run)[5:])
    yield figure("kill_to_redone_step_s", [kill(run, i % 4) - normal_s for i in range(repeats)])
    changes: dict[str, list[Row]] = {"shrink": [], "grow": []}
    acknowledgements = []
    for _ in range(repeats):
        for cause, num_workers in (("shrink", 3), ("grow", 4)):
            run.steps(3)
            run.standby_is_ready()
            started = time.perf_counter()
            run.ask("scale", num_workers)
            acknowledgements.append(time.perf_counter() - started)
            changes[cause].append(generation_of(run, cause))
    run.steps(1)
    steps = run.directory.steps()
    for name, cause in (("shrink", "shrink"), ("grow_warm", "grow")):
        yield figure(f"{name}_pause_s", [change["pause_s"] for change in changes[cause]])
        gaps = [gap_before(steps, change["generation"]) - normal_s for change in changes[cause]]
        yield figure(f"{name}_to_first_step_s", gaps)
    yield figure("scale_ack_s", acknowledgements)
    yield figure("status_s", [timed_status(run) for _ in range(200)])


def planning_rows(folder: Path) -> Iterator[Row]:
    """Answers while plans of seconds are made one after the other.

    The slowest planner there is, in pure Python, with tens of thousands of sequences: nothing
    else takes that long, and nothing holds the interpreter more. The workers compute nothing.
    """
    with elastic_run(
        folder,
        "planning",
        num_workers=4,
        planner="mcore-v2",
        batch_tokens=LONG_PLAN_TOKENS,
        make_runtime=stub_runtime,
    ) as run:
        run.steps(2)
        answers: dict[str, list[float]] = {"status": [], "scale": []}
        started = time.perf_counter()
        for number in range(ASKED_WHILE_PLANNING):
            method, arguments = (("status", ()), ("scale", (4,)))[number % 2]
            # On a schedule: a long wait counts for all that should have been asked meanwhile.
            due = started + number * ASKED_EVERY_S
            time.sleep(max(0.0, due - time.perf_counter()))
            run.ask(method, *arguments)
            answers[method].append(time.perf_counter() - due)
        run.steps(1)
        yield figure("long_plan_s", [step["plan_s"] for step in run.directory.steps()[1:]])
        for method, seconds in answers.items():
            yield figure(f"{method}_while_planning_s", seconds)


def kill(run: ElasticRun, rank: int) -> float:
    """Seconds from a SIGKILL to the first step that the next generation completed."""
    run.steps(5)
    run.standby_is_ready()
    killed_at = run.kill(rank)
    number = generation_of(run, "failure")["generation"]
    step = run.wait_for(lambda kind, record: kind == "step" and record["generation"] == number)
    return float(step["time"]) - killed_at


def generation_of(run: ElasticRun, cause: str) -> Row:
    """The event of the next generation that forms for `cause`."""
    return run.wait_for(
        lambda kind, record: (
            kind == "event" and record["event"] == "generation" and record["cause"] == cause
        )
    )


def gap_before(steps: Sequence[Row], generation: int) -> float:
    """Seconds from the last step before a generation to the first that it completed."""
    return next(
        float(after["time"] - before["time"])
        for before, after in pairwise(steps)
        if before["generation"] < generation <= after["generation"]
    )


def overheads(run: ElasticRun) -> list[float]:
    """Per step: from one completion to the next, less what the slowest worker computed."""
    steps = run.directory.steps()
    return [after["time"] - before["time"] - after["step_s"] for before, after in pairwise(steps)]


def timed_status(run: ElasticRun) -> float:
    """Seconds of one `status` while the run trains."""
    started = time.perf_counter()
    run.ask("status")
    return time.perf_counter() - started


def figure(name: str, values: Sequence[float]) -> Row:
    """One line: the median, and what it is the median of."""
    rounded = [round(value, 5) for value in values]
    ordered = sorted(rounded)
    return {
        "figure": name,
        "value": median(rounded),
        "unit": "s",
        "p99": ordered[math.ceil(0.99 * len(rounded)) - 1],
        "max": ordered[-1],
        "num_values": len(rounded),
        "values": rounded[:20],
    }


def _text(row: Row) -> str:
    if row["value"] is None:
        return "  ".join(f"{name}={value}" for name, value in row.items() if value is not None)
    p99 = f"  (p99 {row['p99']:.4f})" if "p99" in row else ""
    return f"{row['figure']:<32} {row['value']:9.4f} {row['unit']}{p99}"


if __name__ == "__main__":
    main()
