"""The checkpoints of a run: folders of shards, each valid once its manifest is written.

    <path>/step_000020/<shards>, manifest.json

`path` is a folder or any fsspec URL. Workers write and read the shards; the driver writes the
manifest last, so that a checkpoint is whole or is none.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import fsspec

from hydra_ray.data.batches import DataCursor
from hydra_ray.driver.errors import CheckpointError
from workers.protocol import ShardInfo

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
        """The manifest's text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read `to_json`'s text.

        Raises:
            ValueError, KeyError, TypeError: the text is no manifest of this format.
        """
        values = json.loads(text)
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        cursor = DataCursor.from_dict(values.pop("cursor"))
        shards = tuple(ShardInfo(**shard) for shard in values.pop("shards"))
        return cls(cursor=cursor, shards=shards, **values)


class Checkpoints:
    """The checkpoint folder of one run."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        self._files, self._root = fsspec.core.url_to_fs(self.path)

    def folder(self, step: int) -> str:
        """Where the shards of `step` go: what workers are told."""
        return f"{self.path}/step_{step:06d}"

    def prepare(self, step: int) -> None:
        """Make an empty folder for `step`; what a crashed attempt left there goes."""
        self.remove(step)
        self._files.makedirs(self._inner(step), exist_ok=True)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which makes the checkpoint valid.

        Raises:
            CheckpointError: it cannot be written.
        """
        target = f"{self._inner(manifest.step)}/{MANIFEST}"
        try:
            with self._files.open(f"{target}.part", "w") as file:
                file.write(manifest.to_json())
            self._files.mv(f"{target}.part", target)
        except OSError as error:
            raise CheckpointError(
                "a checkpoint's manifest cannot be written", value=target, limit=str(error)
            ) from error

    def steps(self) -> list[int]:
        """The steps of all valid checkpoints, oldest first."""
        if not self._files.exists(self._root):
            return []
        names = [
            str(path).rstrip("/").rsplit("/", 1)[-1]
            for path in self._files.ls(self._root, detail=False)
        ]
        found = sorted(int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d+)", name)))
        return [s for s in found if self._files.exists(f"{self._inner(s)}/{MANIFEST}")]

    def read(self, step: int) -> Manifest:
        """The manifest of `step`, once its shards are seen to be there in full size.

        The checksums are for the workers, who read the bytes anyway.

        Raises:
            CheckpointError: the manifest is damaged, or a shard is missing or cut short.
        """
        path = f"{self._inner(step)}/{MANIFEST}"
        try:
            manifest = Manifest.from_json(self._files.cat_file(path).decode())
            folder = self._inner(step)
            sizes = {s.path: self._files.size(f"{folder}/{s.path}") for s in manifest.shards}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                "a checkpoint is damaged", value=path, limit=f"{type(error).__name__}: {error}"
            ) from error
        for shard in manifest.shards:
            if sizes[shard.path] != shard.num_bytes:
                raise CheckpointError(
                    "a checkpoint shard is cut short",
                    value=f"{self.folder(step)}/{shard.path}: {sizes[shard.path]} bytes",
                    limit=f"{shard.num_bytes} bytes",
                )
        return manifest

    def retain(self, keep: int) -> Sequence[int]:
        """Remove all but the newest `keep` valid checkpoints; returns the removed steps."""
        old = self.steps()[:-keep]
        for step in old:
            self.remove(step)
        return old

    def remove(self, step: int) -> None:
        """Remove `step`'s checkpoint, manifest first so that it is never half valid."""
        manifest = f"{self._inner(step)}/{MANIFEST}"
        if self._files.exists(manifest):
            self._files.rm_file(manifest)
        if self._files.exists(self._inner(step)):
            self._files.rm(self._inner(step), recursive=True)

    def _inner(self, step: int) -> str:
        return f"{self._root}/step_{step:06d}"
