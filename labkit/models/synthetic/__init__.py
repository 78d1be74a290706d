"""Synthetic models: directories with random weights from a seed, and tokenizers trained for them.

In: a shape and a seed. Out: a directory that ``mlx_lm.load`` loads.
"""
