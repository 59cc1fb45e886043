"""torch.distributed.checkpoint on any fsspec file system, checksummed as it is written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)

from workers.protocol import ShardInfo
from workers.storage import HashingStream, is_folder_of_this_machine, open_storage

Path = str | os.PathLike[str]


class StoredFiles(FileSystemBase):
    """The file operations torch asks for; remembers size and checksum of what was written.

    Args:
        files: an fsspec file system.
        can_rename: whether it moves a file without copying and removing it.
    """

    def __init__(self, files: Any, *, can_rename: bool) -> None:
        self._files, self._can_rename = files, can_rename
        self._written: dict[str, tuple[int, str]] = {}

    def written(self) -> tuple[ShardInfo, ...]:
        """Every file written so far; paths start at the shard's own folder."""
        return tuple(
            ShardInfo(path="/".join(PurePosixPath(path).parts[-2:]), num_bytes=size, blake2b=digest)
            for path, (size, digest) in sorted(self._written.items())
        )

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
        """Open a file to be read, or to be written from its start to its end."""
        with self._files.open(str(path), mode) as stream:
            if "w" not in mode:
                yield stream
                return
            hashed = HashingStream(stream)
            yield hashed
        self._written[str(path)] = (hashed.tell(), hashed.hexdigest())

    def concat_path(self, path: Path, suffix: str) -> str:
        """A file in a folder."""
        return f"{path}/{suffix}"

    def init_path(self, path: Path) -> Path:
        """Paths are taken as they are."""
        return path

    def rename(self, path: Path, new_path: Path) -> None:
        """Move a file, and what is known of it.

        An object store copies it, and the old one stays: not every bucket lets its writers remove
        what they wrote. It is torch's index, which is small, and goes with its checkpoint.
        """
        if self._can_rename:
            self._files.mv(str(path), str(new_path))
        else:
            self._files.cp_file(str(path), str(new_path))
        self._written[str(new_path)] = self._written.pop(str(path))

    def mkdir(self, path: Path) -> None:
        """Make a folder, where the file system has such things."""
        self._files.makedirs(str(path), exist_ok=True)

    def exists(self, path: Path) -> bool:
        """Whether a file is there."""
        return bool(self._files.exists(str(path)))

    def rm_file(self, path: Path) -> None:
        """Remove a file."""
        self._files.rm_file(str(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Any path will do."""
        return bool(checkpoint_id)


def shard_writer(path: str) -> tuple[FileSystemWriter, StoredFiles]:
    """A writer of one shard into the folder `path`, and the record of what it writes."""
    files, inner = open_storage(path)
    is_folder = is_folder_of_this_machine(path)
    stored = StoredFiles(files, can_rename=is_folder)
    writer = FileSystemWriter(inner, single_file_per_rank=True, sync_files=is_folder)
    writer.fs = stored  # type: ignore[assignment]  # torch names its own subclass there
    writer.path = inner
    return writer, stored


def shard_reader(path: str) -> FileSystemReader:
    """A reader of one shard."""
    files, inner = open_storage(path)
    reader = FileSystemReader(inner)
    reader.fs = StoredFiles(files, can_rename=False)  # type: ignore[assignment]
    reader.path = inner
    return reader
