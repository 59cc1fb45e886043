"""A checkpoint's shards: each process writes the keys it owns, any pool reads them back.

Every writer uses torch.distributed.checkpoint on its own folder, `shard_00003/` for rank 3, so
writing needs no collective (unless the optimizer is sharded) and a reader finds each key by the
shards' metadata, whatever the number of workers then or now. The driver writes the manifest.
"""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from workers.errors import CheckpointError
from workers.protocol import ShardInfo
from workers.state import TrainState

_STEP_KEY = "step"
_BLOCK_BYTES = 1 << 22


class ShardWriter:
    """Writes one process's shard in the background; one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[tuple[ShardInfo, ...]] | None = None

    def start(self, state: TrainState, owned: Iterable[str], folder: str, rank: int) -> None:
        """Copy the owned tensors to host memory now, and write them while training goes on."""
        if self._running is not None:
            raise CheckpointError("a shard is still being written", remedy="Finish it first.")
        snapshot = {key: state.tensors[key].detach().cpu().clone() for key in owned}
        self._running = self._thread.submit(_write, snapshot, state.step, folder, rank)

    def finish(self, timeout_s: float) -> tuple[ShardInfo, ...]:
        """Wait for the shard that was started; its files with sizes and checksums."""
        if self._running is None:
            return ()
        try:
            return self._running.result(timeout_s)
        finally:
            self._running = None

    def close(self) -> None:
        """End the writing thread, after the shard in progress."""
        self._thread.shutdown(wait=True)


def _write(
    tensors: dict[str, torch.Tensor], step: int, folder: str, rank: int
) -> tuple[ShardInfo, ...]:
    if not tensors:
        return ()
    path = Path(folder) / f"shard_{rank:05d}"
    path.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(path, single_file_per_rank=True)
    save({**tensors, _STEP_KEY: step}, storage_writer=writer, no_dist=True)
    return tuple(
        ShardInfo(
            path=f"{path.name}/{file.name}",
            num_bytes=file.stat().st_size,
            blake2b=checksum(file),
        )
        for file in sorted(path.iterdir())
    )


def checksum(file: Path) -> str:
    """A 128-bit BLAKE2b of a file, in hexadecimal."""
    state = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            state.update(block)
    return state.hexdigest()


def verify(folder: str, shards: Iterable[ShardInfo]) -> None:
    """Check that every shard is there, and is what was written.

    Raises:
        CheckpointError: a file is missing, or its size or checksum differs.
    """
    for shard in shards:
        file = Path(folder) / shard.path
        if not file.is_file():
            raise CheckpointError("a checkpoint shard is missing", value=file)
        if file.stat().st_size != shard.num_bytes or checksum(file) != shard.blake2b:
            raise CheckpointError(
                "a checkpoint shard is damaged",
                value=file,
                limit=f"{shard.num_bytes} bytes with checksum {shard.blake2b}",
                remedy="Resume from an older checkpoint.",
            )


def read(folder: str, wanted: dict[str, torch.Tensor]) -> TrainState:
    """The tensors of `wanted`, filled from whichever shards hold them.

    Args:
        folder: the checkpoint's folder, with its `shard_*` folders.
        wanted: a tensor of the right shape and type for each key; left as it is.

    Raises:
        CheckpointError: there is no shard, a key is in none, or a shape differs.
    """
    tensors = {key: torch.empty_like(tensor, device="cpu") for key, tensor in wanted.items()}
    step = -1
    missing = set(tensors)
    for path in sorted(Path(folder).glob("shard_*")):
        reader = FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata
        mine = {key: tensors[key] for key in stored if key in tensors}
        _check_shapes(mine, stored, path)
        part: dict[str, Any] = {**mine, _STEP_KEY: step}
        load(part, storage_reader=reader, no_dist=True)
        step = part[_STEP_KEY]
        missing -= mine.keys()
    if missing or step < 0:
        raise CheckpointError(
            "the checkpoint does not hold the model's state",
            value=f"{folder}, {len(missing)} of {len(wanted)} tensors missing",
            limit=min(missing) if missing else "at least one shard",
            remedy="Resume with the model and the tensor-parallel size it was made with.",
        )
    return TrainState(step=step, tensors=tensors)


def _check_shapes(mine: dict[str, torch.Tensor], stored: Mapping[str, object], path: Path) -> None:
    for key, tensor in mine.items():
        size = getattr(stored[key], "size", None)
        if size != tensor.shape:
            raise CheckpointError(
                f"the checkpoint's {key} has another shape",
                value=f"{size} in {path}",
                limit=tuple(tensor.shape),
                remedy="Resume with the model it was made with.",
            )
