"""Makes a tokenised corpus from text: streaming, and the same whatever the processes.

Memory holds a few chunks a process and the longest document; what has been seen (8 bytes a
document, for finding duplicates) lives in a temporary SQLite database that spills to disk.
"""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hydra_ray.data.corpus import CorpusInfo
from hydra_ray.data.sources import find_chunks
from hydra_ray.data.tokenise import PrepareOptions, Tokenised, content_digest, tokenise_all
from hydra_ray.data.tokenizer import load_tokenizer
from hydra_ray.data.writer import CorpusWriter
from planner.errors import InputError


@dataclass(slots=True)
class CorpusSummary:
    """What became of the documents.

    Args:
        documents: texts read, empty and repeated ones included.
        not_text: files skipped because they are not UTF-8 text.
        empty: documents with nothing but white space, left out.
        duplicates: documents whose text came before, left out.
        too_long: documents longer than the context: split, or dropped.
        sequences: rows written.
        tokens: tokens written.
        longest: tokens of the longest sequence written.
        done_bytes: bytes of the sources read so far.
        total_bytes: bytes of the sources.
    """

    documents: int = 0
    not_text: int = 0
    empty: int = 0
    duplicates: int = 0
    too_long: int = 0
    sequences: int = 0
    tokens: int = 0
    longest: int = 0
    done_bytes: int = 0
    total_bytes: int = 0


def prepare_corpus(
    sources: Sequence[str],
    out: str | Path,
    options: PrepareOptions,
    *,
    processes: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[CorpusSummary], None] | None = None,
) -> CorpusSummary:
    """Read documents, tokenise them, and write `out` in one move at the end.

    Args:
        sources: folders, text files, JSONL, Parquet, or "python-stdlib".
        out: the corpus file to make.
        options: tokenizer, context and what to do with longer documents.
        processes: that tokenise at the same time; 1 does it here.
        overwrite: replace `out` if it is there.
        on_progress: called after every chunk with the counts so far.

    Raises:
        InputError: a source, the tokenizer or `out` cannot be used, or there is no text at all;
            nothing was written.
    """
    target = Path(out)
    _check(target, options, overwrite=overwrite)
    tokenizer = load_tokenizer(options.tokenizer)
    summary = CorpusSummary(
        total_bytes=sum(c.num_bytes for c in find_chunks(sources, options.text_column))
    )
    info = CorpusInfo(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        context=options.context,
    )
    chunks = find_chunks(sources, options.text_column)
    with CorpusWriter(target, info) as writer, closing(_Seen()) as seen:
        for tokenised in tokenise_all(chunks, options, processes):
            _write(tokenised, options, writer, seen, summary)
            if on_progress is not None:
                on_progress(summary)
        if not summary.sequences:
            raise InputError(
                "the sources hold no usable text",
                value=f"{summary.documents} documents, {summary.empty} of them empty",
                remedy="Name folders, text, JSONL or Parquet files with text in them.",
            )
    return summary


def _check(out: Path, options: PrepareOptions, *, overwrite: bool) -> None:
    if options.context < 2:
        raise InputError(
            "the context is too short to predict anything", value=options.context, limit=">= 2"
        )
    if out.is_dir():
        raise InputError("the corpus would replace a folder", value=str(out))
    if out.exists() and not overwrite:
        raise InputError(
            "the corpus is already there",
            value=str(out),
            remedy="Choose another name, or pass --overwrite.",
        )


class _Seen:
    """Remembers digests in a temporary database, on disk once it outgrows SQLite's cache."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE seen (digest INTEGER PRIMARY KEY)")
        self._database.execute("BEGIN")

    def is_new(self, digest: int) -> bool:
        """True the first time a digest is shown."""
        row = self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        return row.rowcount == 1

    def close(self) -> None:
        """Forget everything."""
        self._database.close()


def _write(
    tokenised: Tokenised,
    options: PrepareOptions,
    writer: CorpusWriter,
    seen: _Seen,
    summary: CorpusSummary,
) -> None:
    """Write one chunk's new documents and count what became of all of them."""
    summary.documents += len(tokenised.documents) + tokenised.empty
    summary.empty += tokenised.empty
    summary.not_text += tokenised.not_text
    summary.done_bytes += tokenised.chunk.num_bytes
    for digest, document in zip(tokenised.digests, tokenised.documents, strict=True):
        if not seen.is_new(digest):
            summary.duplicates += 1
            continue
        if len(document) > options.context:
            summary.too_long += 1
            if options.on_too_long == "drop":
                continue
        for part, start in enumerate(range(0, len(document), options.context)):
            tokens = document[start : start + options.context]
            writer.add(_part_id(digest, part), tokens)
            summary.sequences += 1
            summary.tokens += len(tokens)
            summary.longest = max(summary.longest, len(tokens))


def _part_id(document_digest: int, part: int) -> int:
    """A sequence's id: the document's own for its first part, so splitting changes no other."""
    return document_digest if part == 0 else content_digest(b"%d/%d" % (document_digest, part))
