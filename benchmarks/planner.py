"""`python -m benchmarks.planner [--json] [--out FILE]`: planning time and plan quality.

Run from the checkout, on an idle machine; under 12 minutes on 2 cores. With --json, one object a
line: kinds "machine", "time", "cold_start", "ratio" and "quality".
"""

import argparse
import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: times are of one core

from benchmarks.machine import machine
from benchmarks.planner_time import cold_start_rows, time_rows

COLUMNS = {
    "time": ("planner", "ranks", "sequences", "plan_s", "cpu_s", "sort_s"),
    "cold_start": ("planner", "first_plan_s"),
    "ratio": ("planner", "ranks", "ratio", "of"),
    "quality": (
        "planner", "ranks", "context", "cost", "coupling", "bound_ratio", "worst", "batches",
    ),
}  # fmt: skip


def main() -> None:
    """Measure, print as it goes, and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--out", type=Path, help="also record the JSON lines in this file")
    parser.add_argument("--only", choices=("time", "quality"), help="one half of it")
    options = parser.parse_args()
    record = options.out.open("w") if options.out else None
    heading = ""
    for row in rows(options.only):
        line = json.dumps(row)
        if record:
            record.write(line + "\n")
        if options.json:
            print(line, flush=True)
        else:
            heading = _print_text(row, heading)
    if record:
        record.close()


def rows(only: str | None) -> Iterator[dict[str, object]]:
    """All rows, the machine first."""
    yield {"kind": "machine", **machine()}
    if only != "quality":
        times = []
        for row in chain(time_rows(), cold_start_rows()):
            times.append(row)
            yield row
        yield from ratio_rows(times)
    if only != "time":
        from benchmarks.planner_quality import quality_rows

        yield from quality_rows()


def ratio_rows(times: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """How many times faster ours is than megatron-core's, and slower than the bare sort.

    Of CPU seconds, which a busy machine changes least.
    """
    cpu_s = {(row["planner"], row["ranks"]): row["cpu_s"] for row in times if "cpu_s" in row}
    sort_s = {row["ranks"]: row["sort_cpu_s"] for row in times if "cpu_s" in row}
    for (planner, ranks), ours in cpu_s.items():
        if planner not in ("hydra", "hydra-opt"):
            continue
        base = {"kind": "ratio", "planner": planner, "ranks": ranks}
        yield {**base, "of": "its time to a sort's", "ratio": ours / sort_s[ranks]}
        if ("megatron-core", ranks) in cpu_s:
            theirs = cpu_s["megatron-core", ranks]
            yield {**base, "of": "megatron-core's time to its", "ratio": theirs / ours}


def _print_text(row: dict[str, object], heading: str) -> str:
    """One line of a table; returns the kind, so that each table gets one heading."""
    kind = str(row["kind"])
    if kind == "machine":
        print(", ".join(f"{name} {value}" for name, value in row.items() if name != "kind"))
        return heading
    columns = COLUMNS[kind]
    if kind != heading:
        print(f"\n{kind}\n" + "  ".join(f"{column:>13}" for column in columns))
    print("  ".join(f"{_shown(row.get(column)):>13}" for column in columns), flush=True)
    return kind


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
