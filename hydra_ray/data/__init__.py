"""From documents to global batches: prepare a corpus, index it, walk it in order."""
