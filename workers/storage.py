"""The file system behind a checkpoint's path: a folder, or any fsspec URL.

Credentials and endpoints come from the environment, as each fsspec implementation documents.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from planner.errors import HydraError

BLOCK_BYTES = 1 << 22


def open_storage(path: str) -> tuple[Any, str]:
    """The file system of `path`, and the path within it.

    Listings are never cached: other processes write into the same folders.

    Args:
        path: a folder, or a URL such as s3://bucket/runs.
    """
    files, inner = fsspec.core.url_to_fs(path, use_listings_cache=False)
    return files, str(inner).rstrip("/")


@contextmanager
def storage_errors(
    kind: type[HydraError], what: str, path: str, *, remedy: str = ""
) -> Iterator[None]:
    """Turn whatever the file system raises into an error of `kind`.

    The calls alone belong into it: implementations of fsspec let through what their client
    libraries raise, and those need not be OSErrors (botocore's EndpointConnectionError is none).

    Args:
        kind: the error to raise.
        what: what could not be done.
        path: where.
        remedy: what the user can do about it.
    """
    try:
        yield
    except HydraError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise kind(what, value=path, limit=cause, remedy=remedy) from error


def is_folder_of_this_machine(path: str) -> bool:
    """Whether `path` is a plain folder, where renaming is atomic and free."""
    return "://" not in path or path.startswith("file://")


def checksum(files: Any, path: str) -> tuple[int, str]:
    """Size of a file in bytes and its 128-bit BLAKE2b in hexadecimal. One pass, 4 MiB at a time."""
    state, num_bytes = hashlib.blake2b(digest_size=16), 0
    with files.open(path, "rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            state.update(block)
            num_bytes += len(block)
    return num_bytes, state.hexdigest()


class HashingStream:
    """Passes on what is written to it, and knows its size and checksum without reading it again."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._state, self._num_bytes = inner, hashlib.blake2b(digest_size=16), 0

    def write(self, data: Any) -> int:
        """Write all of `data`; returns its bytes."""
        num_bytes = memoryview(data).nbytes
        self._state.update(data)
        self._inner.write(data)
        self._num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._num_bytes

    def flush(self) -> None:
        """Pass on to the file beneath."""
        self._inner.flush()

    def close(self) -> None:
        """Leave the file beneath to whoever opened it."""

    def fileno(self) -> int:
        """The descriptor of the file beneath, to synchronise it."""
        return int(self._inner.fileno())

    def hexdigest(self) -> str:
        """The 128-bit BLAKE2b of all that was written."""
        return self._state.hexdigest()
