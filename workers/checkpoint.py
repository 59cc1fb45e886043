"""A checkpoint's shards: each process writes the keys it owns, any pool reads them back.

Every writer uses torch.distributed.checkpoint on a folder of its own, so writing needs no
collective (unless the optimizer is sharded) and a reader finds each key by the shards' metadata,
whatever the number of workers then or now. A shard's name holds generation and rank, so that what
an attempt that was given up still writes never mixes with the next attempt's. The driver writes the
manifest, which lists the files that count.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from workers.errors import CheckpointError, CheckpointMismatchError
from workers.protocol import ShardInfo
from workers.shard_files import shard_reader, shard_writer
from workers.state import TrainState
from workers.storage import checksum, open_storage, storage_errors

_STEP_KEY = "step"
_UNWRITABLE = "a checkpoint shard cannot be written"
_UNREADABLE = "a checkpoint shard is missing, or cannot be read"
_FREE_SPACE = "Free space there, or set checkpoint.path to another place."


class ShardWriter:
    """Writes one process's shards in the background, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._latest: Future[tuple[ShardInfo, ...]] | None = None

    def start(self, state: TrainState, owned: Iterable[str], path: str) -> None:
        """Copy the owned tensors to host memory now, and write them while training goes on.

        A shard still in writing was given up by the driver: it is written to its end, first.

        Args:
            state: what this process holds.
            owned: the keys it writes.
            path: the shard's own folder, or its URL.
        """
        self._latest = None  # what fails from here on has written nothing
        snapshot = {key: state.tensors[key].detach().cpu().clone() for key in owned}
        self._latest = self._thread.submit(_write, snapshot, state.step, path)

    def finish(self, timeout_s: float) -> tuple[ShardInfo, ...]:
        """Wait for the shard that was started last; its files with sizes and checksums.

        Raises:
            CheckpointError: it could not be written.
        """
        latest = self._latest
        return () if latest is None else latest.result(timeout_s)

    def close(self) -> None:
        """End the writing thread, after the shard in progress."""
        self._thread.shutdown(wait=True)


def shard_name(generation: int, rank: int) -> str:
    """The folder of one process's shard within a checkpoint."""
    return f"shard_{generation:05d}_{rank:05d}"


def _write(tensors: dict[str, torch.Tensor], step: int, path: str) -> tuple[ShardInfo, ...]:
    if not tensors:
        return ()
    try:
        with storage_errors(CheckpointError, _UNWRITABLE, path, remedy=_FREE_SPACE):
            writer, stored = shard_writer(path)
            save({**tensors, _STEP_KEY: step}, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(
            _UNWRITABLE, value=path, limit=_cause(error), remedy=_FREE_SPACE
        ) from None
    return stored.written()


def verify(folder: str, shards: Iterable[ShardInfo]) -> None:
    """Check that files are there, and are what was written.

    Raises:
        CheckpointError: a file is missing, or its size or checksum differs.
    """
    files, inner = open_storage(folder)
    for shard in shards:
        with storage_errors(CheckpointError, _UNREADABLE, f"{folder}/{shard.path}"):
            found = checksum(files, f"{inner}/{shard.path}")
        if found != (shard.num_bytes, shard.blake2b):
            raise CheckpointError(
                "a checkpoint shard is damaged",
                value=f"{folder}/{shard.path}: {found[0]} bytes with checksum {found[1]}",
                limit=f"{shard.num_bytes} bytes with checksum {shard.blake2b}",
                remedy="Resume from an older checkpoint.",
            )


def read(folder: str, names: Sequence[str], wanted: dict[str, torch.Tensor]) -> TrainState:
    """The tensors of `wanted`, filled from whichever shards hold them.

    The metadata of shards are pickles: `verify` them first.

    Args:
        folder: the checkpoint's folder or URL.
        names: the folders of its shards in there.
        wanted: a tensor of the right shape and type for each key; left as it is.

    Raises:
        CheckpointError: a shard cannot be read.
        CheckpointMismatchError: a key is in no shard, or a shape differs.
    """
    tensors = {key: torch.empty_like(tensor, device="cpu") for key, tensor in wanted.items()}
    step = -1
    missing = set(tensors)
    for name in sorted(names):
        path = f"{folder}/{name}"
        try:
            found, step = _read_shard(path, tensors)
        except CheckpointException as error:
            raise CheckpointError(_UNREADABLE, value=path, limit=_cause(error)) from None
        missing -= found
    if missing or step < 0:
        raise CheckpointMismatchError(
            "the checkpoint does not hold the model's state",
            value=f"{folder}, {len(missing)} of {len(wanted)} tensors missing",
            limit=min(missing) if missing else "at least one shard",
            remedy="Resume with the model and the tensor-parallel size it was made with.",
        )
    return TrainState(step=step, tensors=tensors)


def _read_shard(path: str, tensors: Mapping[str, torch.Tensor]) -> tuple[set[str], int]:
    """Fill those of `tensors` that the shard holds; which they are, and the step."""
    with storage_errors(CheckpointError, _UNREADABLE, path):
        reader = shard_reader(path)
        stored = reader.read_metadata().state_dict_metadata
    mine = {key: tensors[key] for key in stored if key in tensors}
    _check_shapes(mine, stored, path)
    part: dict[str, Any] = {**mine, _STEP_KEY: -1}
    load(part, storage_reader=reader, no_dist=True)
    return set(mine), int(part[_STEP_KEY])


def _check_shapes(mine: dict[str, torch.Tensor], stored: Mapping[str, object], path: str) -> None:
    for key, tensor in mine.items():
        size = getattr(stored[key], "size", None)
        if size != tensor.shape:
            raise CheckpointMismatchError(
                f"the checkpoint's {key} has another shape",
                value=f"{size} in {path}",
                limit=tuple(tensor.shape),
                remedy="Resume with the model it was made with.",
            )


def _cause(error: CheckpointException) -> str:
    """What went wrong beneath torch's collection of every rank's failures."""
    first = next(iter(error.failures.values()))[0] if error.failures else error
    return f"{type(first).__name__}: {first}"
