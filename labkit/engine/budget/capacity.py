"""How much memory a request of so many tokens needs, by the layout of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from labkit import config

STEP = 256  # tokens: without blocks, memory comes in steps of it, as in mlx_lm's caches


def rounded(tokens: int) -> int:
    """Round up to whole steps."""
    return -(-tokens // STEP) * STEP


def blocks_alone(kv: config.KV, tokens: int) -> int:
    """Return the blocks of memory without which a request cannot be served even alone.

    The paged pool's null block is one of them.
    """
    if kv.layout is config.KVLayout.paged:
        return -(-tokens // kv.block_size) + 1
    return -(-rounded(tokens) // kv.block_size)


def slots_together(kv: config.KV, lengths: Sequence[int]) -> int:
    """Return the tokens of memory that requests of these lengths take together."""
    if kv.layout is config.KVLayout.padded:
        return len(lengths) * rounded(max(lengths, default=0))
    if kv.layout is config.KVLayout.contiguous:
        return sum(map(rounded, lengths))
    return sum(-(-n // kv.block_size) * kv.block_size for n in lengths)
