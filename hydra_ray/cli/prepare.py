"""`hydra-ray prepare`: text, JSONL or Parquet to a tokenised corpus."""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hydra_ray.cli.output import JsonFlag, say_json, say_table
from hydra_ray.cli.progress import progress

if TYPE_CHECKING:
    from hydra_ray.data.prepare import CorpusSummary


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Folders of text or code, text files, JSONL, Parquet, or python-stdlib.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The corpus file to write.")],
    context: Annotated[int, typer.Option(help="Most tokens of one sequence.")] = 32768,
    tokenizer: Annotated[
        str, typer.Option(help="bytes, or the path of a Hugging Face tokenizer.json.")
    ] = "bytes",
    text_column: Annotated[
        str, typer.Option(help="The column of text in JSONL and Parquet sources.")
    ] = "text",
    on_too_long: Annotated[
        Literal["split", "drop"], typer.Option(help="Documents longer than the context.")
    ] = "split",
    processes: Annotated[
        int, typer.Option(min=0, help="Processes that tokenise; 0: one a core.")
    ] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Turn text into a tokenised Parquet corpus to train on."""
    from hydra_ray.data.prepare import prepare_corpus
    from hydra_ray.data.tokenise import PrepareOptions

    options = PrepareOptions(
        context=context, tokenizer=tokenizer, text_column=text_column, on_too_long=on_too_long
    )
    started = time.monotonic()
    with progress("preparing") as advance:
        summary = prepare_corpus(
            sources,
            out,
            options,
            processes=processes or len(os.sched_getaffinity(0)),
            overwrite=overwrite,
            on_progress=lambda s: advance(s.done_bytes, s.total_bytes, describe(s)),
        )
    if as_json:
        seconds = round(time.monotonic() - started, 3)
        say_json({"corpus": str(out), **asdict(summary), "seconds": seconds})
    else:
        say_table(_rows(out, summary, on_too_long))


def describe(summary: "CorpusSummary") -> str:
    """The counts so far, in a few words."""
    return f"{summary.documents:,} documents, {summary.tokens:,} tokens"


def _rows(out: Path, summary: "CorpusSummary", on_too_long: str) -> dict[str, str]:
    fate = {"split": "split", "drop": "dropped"}[on_too_long]
    return {
        "corpus": str(out),
        "documents read": f"{summary.documents:,}",
        "sequences written": f"{summary.sequences:,}",
        "tokens written": f"{summary.tokens:,}",
        "longest sequence": f"{summary.longest:,} tokens",
        "longer than the context": f"{summary.too_long:,} ({fate})",
        "duplicates left out": f"{summary.duplicates:,}",
        "empty left out": f"{summary.empty:,}",
        "files that are not text": f"{summary.not_text:,}",
    }
