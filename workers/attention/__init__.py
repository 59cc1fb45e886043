"""Attention over a context-parallel group of any degree: inner Ulysses, outer zigzag ring.

`engine` is the way in; the rest is read in the order layout, kernels, all_to_all, ring.

Shape legend of the package: T local tokens, S tokens of a Ulysses shard (T * u), H query heads,
K key-value heads, D head dim of queries and keys, E head dim of values.
"""
