"""`python -m benchmarks.engine [--json] [--out FILE] [--only PART]`: the attention engine's speed.

Run from the checkout, on an idle machine; under 12 minutes on 2 cores. With --json, one object a
line: {"figure", "value", ...}. Parts: speed, rivals, steps.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a rank is one thread

import torch

from benchmarks.engine_rivals import rival_rows
from benchmarks.engine_speed import keep_freed_memory, speed_rows
from benchmarks.engine_steps import step_rows
from benchmarks.machine import machine

PARTS: dict[str, Callable[[], Iterator[dict[str, object]]]] = {
    "speed": speed_rows,
    "rivals": rival_rows,
    "steps": step_rows,
}
HEADLINE = ("figure", "value")


def main() -> None:
    """Measure, print as it goes, and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--out", type=Path, help="also record the JSON lines in this file")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part of it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # the ranks are forked, and inherit it
    record = options.out.open("w") if options.out else None
    for row in rows(options.only):
        line = json.dumps(row)
        if record:
            record.write(line + "\n")
            record.flush()
        print(line if options.json else _text(row), flush=True)
    if record:
        record.close()


def rows(only: str | None) -> Iterator[dict[str, object]]:
    """All rows, the machine first."""
    yield {"figure": "machine", "value": None, **machine(), "torch": torch.__version__}
    for name, part in PARTS.items():
        if only in (None, name):
            yield from part()


def _text(row: dict[str, object]) -> str:
    details = ", ".join(
        f"{key} {_short(value)}" for key, value in row.items() if key not in HEADLINE
    )
    return f"{row['figure']:32} {_short(row['value']):>10}  {details}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
