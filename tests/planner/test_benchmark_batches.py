"""The batches that figures are measured on are reproducible and cover the whole data."""

import numpy as np

from benchmarks.lengths import document_lengths, draw_batch


def test_a_batch_is_a_function_of_its_seed():
    assert draw_batch(500_000, 32_768, 7).tolist() == draw_batch(500_000, 32_768, 7).tolist()
    assert draw_batch(500_000, 32_768, 7).tolist() != draw_batch(500_000, 32_768, 8).tolist()


def test_a_batch_reaches_its_tokens_with_its_last_sequence():
    lengths = draw_batch(3_000_000, 32_768, 1)
    assert lengths.max() <= 32_768
    assert lengths.sum() >= 3_000_000 > lengths[:-1].sum()


def test_documents_come_again_only_when_all_were_drawn():
    whole = np.minimum(document_lengths(), 4096)
    lengths = draw_batch(int(whole.sum()) + 1000, 4096, 0)
    assert np.sort(lengths[: len(whole)]).tolist() == np.sort(whole).tolist()
    assert len(lengths) > len(whole)
