"""What prepare writes: every document's tokens once, stable ids, whole files or none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from hydra_ray.data import sources
from hydra_ray.data.index import SequenceIndex
from hydra_ray.data.prepare import CorpusSummary, prepare_corpus
from hydra_ray.data.tokenise import PrepareOptions
from planner.errors import InputError

END = 256


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def read_corpus(path: Path) -> dict[int, list[int]]:
    with SequenceIndex(str(path)) as index:
        tokens = np.split(
            index.tokens(np.arange(len(index))), np.cumsum(index.lengths)[:-1].tolist()
        )
        return {int(i): part.tolist() for i, part in zip(index.ids, tokens, strict=True)}


def test_documents_become_bytes_and_an_end(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["abc", "é\ud800", "x"])
    summary = prepare_corpus([source], tmp_path / "out.parquet", PrepareOptions(context=64))
    assert list(read_corpus(tmp_path / "out.parquet").values()) == [
        [97, 98, 99, END],
        [0xC3, 0xA9, ord("?"), END],
        [120, END],
    ]
    assert (summary.documents, summary.sequences, summary.tokens, summary.longest) == (3, 3, 10, 4)
    info = SequenceIndex(str(tmp_path / "out.parquet")).info
    assert (info.tokenizer, info.vocab_size, info.context) == ("bytes", 257, 64)


def test_empty_and_repeated_documents_are_counted_and_left_out(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "", " \n\t", "b", "a", "a"])
    summary = prepare_corpus([source], tmp_path / "out.parquet", PrepareOptions(context=64))
    assert (summary.documents, summary.empty, summary.duplicates) == (6, 2, 2)
    assert sorted(read_corpus(tmp_path / "out.parquet").values()) == [[97, END], [98, END]]


def test_long_documents_are_split_without_losing_a_token(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(25))
    source = write_jsonl(tmp_path / "in.jsonl", ["short", text])
    summary = prepare_corpus([source], tmp_path / "out.parquet", PrepareOptions(context=10))
    short, *parts = read_corpus(tmp_path / "out.parquet").values()
    assert bytes(short[:-1]) == b"short"
    assert [len(part) for part in parts] == [10, 10, 6]
    joined = [token for part in parts for token in part]
    assert joined == [*text.encode(), END]
    assert (summary.too_long, summary.sequences) == (1, 4)


def test_long_documents_are_dropped_when_asked(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["short", "x" * 10, "y" * 9])
    options = PrepareOptions(context=10, on_too_long="drop")
    summary = prepare_corpus([source], tmp_path / "out.parquet", options)
    assert [len(s) for s in read_corpus(tmp_path / "out.parquet").values()] == [6, 10]
    assert (summary.too_long, summary.sequences) == (1, 2)


def test_ids_depend_on_content_alone(tmp_path: Path) -> None:
    texts = ["alpha", "beta" * 20, "gamma"]
    one = write_jsonl(tmp_path / "one.jsonl", texts)
    two = write_jsonl(tmp_path / "two.jsonl", ["new", *reversed(texts)])
    for name, source in (("one", one), ("two", two)):
        prepare_corpus([source], tmp_path / f"{name}.parquet", PrepareOptions(context=50))
    first, second = read_corpus(tmp_path / "one.parquet"), read_corpus(tmp_path / "two.parquet")
    assert len(first) == 4
    assert first.items() <= second.items()
    assert min(second) >= 0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 2000)


@pytest.mark.usefixtures("small_chunks")
def test_processes_change_nothing_in_the_file(tmp_path: Path) -> None:
    texts = [f"{i} " * (i % 37) for i in range(1, 300)]
    source = write_jsonl(tmp_path / "in.jsonl", [*texts, *texts[:20]])
    seen: list[int] = []
    for processes in (1, 2):
        summary = prepare_corpus(
            [source],
            tmp_path / f"{processes}.parquet",
            PrepareOptions(context=64),
            processes=processes,
            on_progress=lambda s: seen.append(s.done_bytes),
        )
        assert summary.done_bytes == summary.total_bytes == Path(source).stat().st_size
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()
    assert len(seen) > 10


def test_a_tokenizer_json_is_used_with_its_own_end_of_text(tmp_path: Path) -> None:
    corpus = ["the cat and the dog and the bird"] * 5
    for name, special in (("with.json", ["<|endoftext|>"]), ("without.json", [])):
        plain = tokenizers.Tokenizer(BPE())
        plain.pre_tokenizer = ByteLevel(add_prefix_space=False)
        trainer = BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
        plain.train_from_iterator(corpus, trainer)
        plain.save(str(tmp_path / name))
    source = write_jsonl(tmp_path / "in.jsonl", ["the dog"])
    for name in ("with.json", "without.json"):
        loaded = tokenizers.Tokenizer.from_file(str(tmp_path / name))
        size = loaded.get_vocab_size()
        out = tmp_path / f"{name}.parquet"
        options = PrepareOptions(context=64, tokenizer=str(tmp_path / name))
        prepare_corpus([source], out, options)
        (tokens,) = read_corpus(out).values()
        info = SequenceIndex(str(out)).info
        end = loaded.token_to_id("<|endoftext|>") if name == "with.json" else size
        assert tokens == [*loaded.encode("the dog").ids, end]
        assert info.vocab_size == max(size, end + 1)
        assert info.tokenizer_digest


def fails(tmp_path: Path, source: str, options: PrepareOptions, **more: bool) -> InputError:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as error:
        prepare_corpus([source], tmp_path / "out.parquet", options, **more)
    assert sorted(tmp_path.rglob("*")) == before
    return error.value


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "in.jsonl", ["a"])
    blank = write_jsonl(tmp_path / "blank.jsonl", ["", " "])
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\noops\n')
    (tmp_path / "tokenizer.json").write_text("{}")
    context = PrepareOptions(context=64)
    assert "no usable text" in fails(tmp_path, blank, context).what
    assert "no JSON object" in fails(tmp_path, str(tmp_path / "broken.jsonl"), context).what
    assert "too short" in fails(tmp_path, good, PrepareOptions(context=1)).what
    for tokenizer in (str(tmp_path / "tokenizer.json"), "/no/such/tokenizer.json"):
        options = PrepareOptions(context=64, tokenizer=tokenizer)
        assert "no tokenizer" in fails(tmp_path, good, options).what
    (tmp_path / "out.parquet").write_text("mine")
    assert "already there" in fails(tmp_path, good, context).what
    assert (tmp_path / "out.parquet").read_text() == "mine"
    prepare_corpus([good], tmp_path / "out.parquet", context, overwrite=True)
    assert len(read_corpus(tmp_path / "out.parquet")) == 1


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "b"])

    def interrupt(_: CorpusSummary) -> None:
        assert list(tmp_path.glob("*.partial"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(
            [source],
            tmp_path / "out.parquet",
            PrepareOptions(context=8),
            on_progress=interrupt,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_row_groups_stay_small_so_that_single_rows_are_cheap(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [str(i) * 20_000 for i in range(60)])
    prepare_corpus([source], tmp_path / "out.parquet", PrepareOptions(context=50_000))
    metadata = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert metadata.num_row_groups > 3


PEAK_MEMORY = """
import resource, sys
from hydra_ray.data.prepare import prepare_corpus
from hydra_ray.data.tokenise import PrepareOptions
prepare_corpus([sys.argv[1]], sys.argv[2], PrepareOptions(context=4096))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    peaks_mib = []
    line = os.urandom(30_000).hex()
    for copies in (150, 600):
        source = tmp_path / f"{copies}.jsonl"
        with source.open("w") as file:
            for i in range(copies):
                file.write(json.dumps({"text": f"{i} {line}"}) + "\n")
        done = subprocess.run(
            [sys.executable, "-c", PEAK_MEMORY, source, tmp_path / f"{copies}.parquet"],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        peaks_mib.append(int(done.stdout))
    grown_tokens_mib = 4 * 450 * len(line) / 2**20
    assert peaks_mib[1] - peaks_mib[0] < grown_tokens_mib / 4, peaks_mib
