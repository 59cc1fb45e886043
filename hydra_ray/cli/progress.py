"""Progress of long work, on stderr: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float, float, str], None]
"""Told (done, total, what to say about it)."""

LINE_EVERY_S = 5.0


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """Show progress while the block runs; the block calls what it is given."""
    show = _bar(title) if sys.stderr.isatty() else _lines(title)
    with show as advance:
        yield advance


@contextmanager
def _bar(title: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, said="")

        def advance(done: float, total: float, said: str) -> None:
            bar.update(task, completed=done, total=total, said=said)

        yield advance


@contextmanager
def _lines(title: str) -> Iterator[Advance]:
    last_s = -LINE_EVERY_S

    def advance(done: float, total: float, said: str) -> None:
        nonlocal last_s
        percent = 100 * done / total if total else 100.0
        now, line = time.monotonic(), f"{title} {percent:3.0f}%  {said}"
        if now - last_s >= LINE_EVERY_S or done >= total:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
            last_s = now

    yield advance
