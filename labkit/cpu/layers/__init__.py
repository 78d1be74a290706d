"""Elementwise and row-wise kernels: activations, norms, rotary embeddings, the greedy token.

In: float32 rows. Out: float32 rows, or a token id per row.
"""
