"""Text to token ids: bytes by default, or any Hugging Face tokenizer.json."""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from planner.errors import InputError

BYTES = "bytes"
END_OF_DOCUMENT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "</s>",
    "<eos>",
    "[SEP]",
)


class Tokenizer(Protocol):
    """Turns one document into ids, the last of which says that the document ends."""

    name: str
    digest: str
    vocab_size: int

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The ids of one document."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """The byte tokenizer for "bytes", else the tokenizer.json at that path.

    Raises:
        InputError: there is no such file, or it is no tokenizer.
    """
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name))


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of a document. Needs no file."""

    name = BYTES
    digest = ""
    vocab_size = 257

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """One id a byte; lone surrogates, which UTF-8 cannot hold, become question marks."""
        data = text.encode("utf-8", errors="replace")
        ids = np.empty(len(data) + 1, np.int32)
        ids[:-1] = np.frombuffer(data, np.uint8)
        ids[-1] = 256
        return ids


class FileTokenizer:
    """A Hugging Face tokenizer.json.

    The end of a document is the first of END_OF_DOCUMENT_NAMES in its vocabulary, or else a new
    id after it. Special tokens the file would add by itself are left out.
    """

    def __init__(self, path: Path) -> None:
        try:
            data = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:
            raise InputError(
                "no tokenizer can be read there",
                value=str(path),
                limit=str(error),
                remedy="Give the path of a Hugging Face tokenizer.json, or `bytes`.",
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        known = [vocabulary[name] for name in END_OF_DOCUMENT_NAMES if name in vocabulary]
        after_last = max(vocabulary.values()) + 1
        self._end_of_document = known[0] if known else after_last
        self.name = path.name
        self.digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        self.vocab_size = after_last if known else after_last + 1

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The file's ids and the end of the document."""
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        ids = self._tokenizer.encode(clean, add_special_tokens=False).ids
        return np.array([*ids, self._end_of_document], np.int32)
