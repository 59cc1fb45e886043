"""Batches of real document lengths: 142,991 documents of a Debian system (data/README.md)."""

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

DATA = Path(__file__).parent / "data" / "lengths_debian_mix.parquet"
TOKENS_A_RANK = 65_536

IntArray = npt.NDArray[np.int64]


@cache
def document_lengths() -> IntArray:
    """[142991] tokens of each document, unclipped."""
    return pq.read_table(DATA, columns=["length"])["length"].to_numpy().astype(np.int64)


def draw_batch(num_tokens: int, context: int, seed: int) -> IntArray:
    """[N] lengths that first reach `num_tokens`, each at most `context`.

    Documents are drawn without replacement; once all are drawn, they are shuffled again.
    """
    generator = np.random.default_rng(seed)
    documents = np.minimum(document_lengths(), context)
    rounds: list[IntArray] = []
    missing = num_tokens
    while missing > 0:
        shuffled = generator.permutation(documents)
        taken = int(np.searchsorted(np.cumsum(shuffled), missing)) + 1
        rounds.append(shuffled[:taken])
        missing -= int(rounds[-1].sum())
    return np.concatenate(rounds)
