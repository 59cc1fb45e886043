"""Tokenises chunks of documents, in this process or in several, and keeps their order."""

import hashlib
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Literal

import numpy as np
import numpy.typing as npt

from hydra_ray.data.sources import Chunk, read_documents
from hydra_ray.data.tokenizer import Tokenizer, load_tokenizer
from planner.errors import HydraError

CHUNK_TIMEOUT_S = 3600.0
ID_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """How text becomes sequences. `tokenizer` is "bytes" or the path of a tokenizer.json."""

    context: int
    tokenizer: str = "bytes"
    text_column: str = "text"
    on_too_long: Literal["split", "drop"] = "split"


@dataclass(slots=True)
class Tokenised:
    """One chunk's documents: digests [D] and ids, in order."""

    chunk: Chunk
    digests: list[int] = field(default_factory=list)
    documents: list[npt.NDArray[np.int32]] = field(default_factory=list)
    empty: int = 0
    not_text: int = 0


def content_digest(data: bytes) -> int:
    """A content hash that fits a non-negative int64."""
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - ID_BITS)


def _tokenise(chunk: Chunk, options: PrepareOptions, tokenizer: Tokenizer) -> Tokenised:
    result = Tokenised(chunk)
    for text in read_documents(chunk, options.text_column):
        if text is None:
            result.not_text += 1
        elif not text or text.isspace():
            result.empty += 1
        else:
            result.digests.append(content_digest(text.encode("utf-8", errors="replace")))
            result.documents.append(tokenizer.encode(text))
    return result


def tokenise_all(
    chunks: Iterator[Chunk], options: PrepareOptions, processes: int
) -> Iterator[Tokenised]:
    """Every chunk tokenised, in order."""
    if processes > 1:
        yield from _tokenise_in_processes(chunks, options, processes)
        return
    tokenizer = load_tokenizer(options.tokenizer)
    for chunk in chunks:
        yield _tokenise(chunk, options, tokenizer)


def _tokenise_in_processes(
    chunks: Iterator[Chunk], options: PrepareOptions, processes: int
) -> Iterator[Tokenised]:
    """Keeps two chunks a process under way, so that memory does not grow with the corpus."""
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_enter_process, initargs=(options,)
    )
    under_way: deque[Future[Tokenised]] = deque()
    try:
        for chunk in chunks:
            with _interrupt_held():
                under_way.append(pool.submit(_tokenise_here, chunk))
            if len(under_way) >= 2 * processes:
                yield under_way.popleft().result(CHUNK_TIMEOUT_S)
        while under_way:
            yield under_way.popleft().result(CHUNK_TIMEOUT_S)
    except (BrokenProcessPool, TimeoutError) as error:
        raise HydraError(
            "a process that tokenises died or hangs",
            value=type(error).__name__,
            remedy="Memory may be short: use fewer --processes.",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Ctrl-C waits until the block is done; only the main thread ever gets one.

    An executor that is interrupted while it starts its processes can no longer be shut down.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


@dataclass(slots=True)
class _ProcessState:
    options: PrepareOptions
    tokenizer: Tokenizer


_here: list[_ProcessState] = []


def _enter_process(options: PrepareOptions) -> None:
    """Ctrl-C is the parent's to handle; the tokenizer is read once a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _here.append(_ProcessState(options, load_tokenizer(options.tokenizer)))


def _tokenise_here(chunk: Chunk) -> Tokenised:
    return _tokenise(chunk, _here[0].options, _here[0].tokenizer)
