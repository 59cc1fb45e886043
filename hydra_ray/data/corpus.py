"""The corpus file: its columns, its metadata, and what is said when a file is no corpus.

One row a sequence: `id` int64 (a content hash, unique), `length` int32 (tokens), `tokens`
list<int32>. The schema's metadata holds a `CorpusInfo`. Row groups are small (ROW_GROUP_TOKENS),
since training reads single sequences in random order.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from planner.errors import InputError

COLUMNS = ("id", "length", "tokens")
ROW_GROUP_TOKENS = 1 << 18
METADATA_KEY = b"hydra_ray.corpus"
PREPARE_REMEDY = "Make a corpus with: hydra-ray prepare SOURCE... --out corpus.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusInfo:
    """How a corpus was tokenised.

    `tokenizer_digest` is empty for the byte tokenizer, else that of its tokenizer.json.
    """

    tokenizer: str
    tokenizer_digest: str
    vocab_size: int
    context: int


def corpus_schema(info: CorpusInfo) -> pa.Schema:
    """The Arrow schema of a corpus file."""
    fields = [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("tokens", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ]
    return pa.schema(fields, metadata={METADATA_KEY: json.dumps(asdict(info)).encode()})


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a local path or a URL that pyarrow knows (s3://, gs://, hdfs://, file://).

    Raises:
        InputError: there is no such file, or it is not a whole Parquet file.
    """
    try:
        filesystem, inner = _filesystem(path)
        source = filesystem.open_input_file(inner)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError("no such file", value=path, remedy=PREPARE_REMEDY) from error
    try:
        return pq.ParquetFile(source, pre_buffer=False)
    except (OSError, pa.ArrowInvalid) as error:
        source.close()
        raise InputError(
            "not a whole Parquet file",
            value=path,
            limit=str(error),
            remedy="It may be truncated or of another format; write it again.",
        ) from error


def _filesystem(path: str) -> tuple[pafs.FileSystem, str]:
    if "://" in path:
        filesystem, inner = pafs.FileSystem.from_uri(path)
        return filesystem, inner
    return pafs.LocalFileSystem(), path


def read_info(file: pq.ParquetFile, path: str) -> CorpusInfo:
    """The corpus's metadata, once its columns are checked.

    Raises:
        InputError: a column is missing or of another type, or the metadata is.
    """
    _check_columns(file.schema_arrow, path)
    metadata: dict[bytes, bytes] = file.schema_arrow.metadata or {}
    try:
        values: dict[str, Any] = json.loads(metadata[METADATA_KEY])
        return CorpusInfo(**values)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            "the corpus does not say how it was tokenised", value=path, remedy=PREPARE_REMEDY
        ) from error


def _check_columns(schema: pa.Schema, path: str) -> None:
    wanted = corpus_schema(CorpusInfo(tokenizer="", tokenizer_digest="", vocab_size=1, context=1))
    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise InputError(
            f"the corpus lacks the column(s) {', '.join(missing)}",
            value=f"{path} with columns {', '.join(schema.names) or '(none)'}",
            limit=f"columns {', '.join(COLUMNS)}",
            remedy=PREPARE_REMEDY,
        )
    for name in COLUMNS:
        have, want = schema.field(name).type, wanted.field(name).type
        if have != want:
            raise InputError(
                f"the corpus's column {name} has another type",
                value=str(have),
                limit=str(want),
                remedy=PREPARE_REMEDY,
            )
