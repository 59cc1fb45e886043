"""The checkpoints of a run: folders of shards, each valid once its manifest is written.

    <path>/step_000020/<shards>, manifest.json

`path` is a folder or any fsspec URL. Workers write and read the shards; the driver writes the
manifest last, so that a checkpoint is whole or is none.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from hydra_ray.data.batches import DataCursor
from hydra_ray.driver.errors import CheckpointError
from planner.errors import InputError
from workers.protocol import ShardInfo
from workers.storage import is_folder_of_this_machine, open_storage, storage_errors

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and where the run goes on from it.

    Args:
        step: the last applied step.
        cursor: where step + 1's batch starts.
        seed: the run's seed; with the step it decides every random choice.
        num_ranks: the pool it was written by; any pool may read it.
        corpus: the fingerprint of the corpus the cursor points into.
        config: the resolved recipe.
        shards: every file, with size and checksum.
    """

    step: int
    cursor: DataCursor
    seed: int
    num_ranks: int
    corpus: str
    config: dict[str, Any]
    shards: tuple[ShardInfo, ...]

    def to_json(self) -> str:
        """The manifest's text, with a checksum of its own."""
        values = {"format": FORMAT, **asdict(self)}
        return json.dumps({"checksum": _checksum(values), **values}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read `to_json`'s text.

        Raises:
            ValueError, KeyError, TypeError: the text is no whole manifest of this format.
        """
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise ValueError("another format")
        if values.pop("checksum") != _checksum(values):
            raise ValueError("another checksum")
        del values["format"]
        cursor = DataCursor.from_dict(values.pop("cursor"))
        shards = tuple(ShardInfo(**shard) for shard in values.pop("shards"))
        return cls(cursor=cursor, shards=shards, **values)


def _checksum(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Checkpoints:
    """The checkpoint folder of one run.

    Args:
        path: a folder or any fsspec URL; it need not exist yet.

    Raises:
        InputError: no installed file system takes such a URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        try:
            self._files, self._root = open_storage(self.path)
        except (ImportError, ValueError) as error:
            raise InputError(
                "checkpoints cannot be kept there",
                value=path,
                limit=str(error),
                remedy="Install that file system's fsspec package (for s3://, the extra s3: "
                "pip install '.[s3]'), or set checkpoint.path to a folder.",
            ) from error

    def folder(self, step: int) -> str:
        """Where the shards of `step` go: what workers are told."""
        return f"{self.path}/step_{step:06d}"

    def prepare(self, step: int) -> None:
        """Make an empty folder for `step`; what a crashed attempt left there goes.

        Raises:
            CheckpointError: the storage cannot be written.
        """
        self.remove(step)
        with self._storage("a checkpoint's folder cannot be made", step):
            self._files.makedirs(self._inner(step), exist_ok=True)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which makes the checkpoint valid.

        A folder gets it by renaming, so that it is never seen half written; an object store shows
        no object before it is whole.

        Raises:
            CheckpointError: it cannot be written.
        """
        target, text = f"{self._inner(manifest.step)}/{MANIFEST}", manifest.to_json().encode()
        with self._storage("a checkpoint's manifest cannot be written", manifest.step):
            if is_folder_of_this_machine(self.path):
                self._files.pipe_file(f"{target}.part", text)
                self._files.mv(f"{target}.part", target)
            else:
                self._files.pipe_file(target, text)

    def steps(self) -> list[int]:
        """The steps of all checkpoints that have a manifest, oldest first.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        with storage_errors(CheckpointError, "checkpoints cannot be listed", self.path):
            return [step for step in self._folders() if self._has_manifest(step)]

    def read(self, step: int) -> Manifest:
        """The manifest of `step`, once its shards are seen to be there in full size.

        The checksums are for the workers, who read the bytes anyway.

        Raises:
            CheckpointError: the manifest is damaged, or a shard is missing or cut short.
        """
        folder = self._inner(step)
        with self._storage("a checkpoint is damaged, or cannot be read", step):
            content = self._files.cat_file(f"{folder}/{MANIFEST}")
            sizes = {path: info["size"] for path, info in self._found(folder).items()}
        try:
            manifest = Manifest.from_json(content.decode())
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                "a checkpoint is damaged",
                value=f"{self.folder(step)}/{MANIFEST}",
                limit=f"{type(error).__name__}: {error}",
            ) from error
        for shard in manifest.shards:
            if sizes.get(shard.path) != shard.num_bytes:
                raise CheckpointError(
                    "a checkpoint shard is missing or cut short",
                    value=f"{self.folder(step)}/{shard.path}: {sizes.get(shard.path)} bytes",
                    limit=f"{shard.num_bytes} bytes",
                )
        return manifest

    def newest_readable(self) -> Manifest | None:
        """The manifest a run would go on from, as far as manifests tell; None without any.

        Raises:
            CheckpointError: there are checkpoints, and no manifest can be read.
        """
        damage: CheckpointError | None = None
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except CheckpointError as error:
                damage = damage or error
        if damage is not None:
            raise damage
        return None

    def retain(self, keep: int, *, newest: int) -> Sequence[int]:
        """Remove what is older than the newest `keep` checkpoints, and attempts that were given up.

        Checkpoints after `newest`, which the run went back from, neither count nor go.

        Returns:
            The removed steps.

        Raises:
            CheckpointError: the storage does not let go of one.
        """
        with storage_errors(CheckpointError, "checkpoints cannot be listed", self.path):
            until = [step for step in self._folders() if step <= newest]
            valid = [step for step in until if self._has_manifest(step)]
        kept = valid[-keep:]
        removed = [step for step in until if step not in kept]
        for step in removed:
            self.remove(step)
        return removed

    def remove(self, step: int) -> None:
        """Remove `step`'s checkpoint, manifest first so that it is never half valid.

        Raises:
            CheckpointError: it cannot be removed.
        """
        with self._storage("a checkpoint cannot be removed", step):
            if self._has_manifest(step):
                self._files.rm_file(f"{self._inner(step)}/{MANIFEST}")
            if self._files.exists(self._inner(step)):
                self._files.rm(self._inner(step), recursive=True)

    def _storage(self, what: str, step: int) -> AbstractContextManager[None]:
        return storage_errors(CheckpointError, what, self.folder(step))

    def _folders(self) -> list[int]:
        """The steps of all folders, valid or not, oldest first."""
        if not self._files.exists(self._root):
            return []
        paths = self._files.ls(self._root, detail=False)
        names = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths]
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d+)", name)))

    def _found(self, folder: str) -> dict[str, dict[str, Any]]:
        """Every file in a folder by its path in there, with what the file system knows of it."""
        files = self._files.find(folder, detail=True)
        return {str(path)[len(folder) + 1 :]: info for path, info in files.items()}

    def _has_manifest(self, step: int) -> bool:
        return bool(self._files.exists(f"{self._inner(step)}/{MANIFEST}"))

    def _inner(self, step: int) -> str:
        return f"{self._root}/step_{step:06d}"
