"""How much memory a request of so many tokens needs, by the layout of the KV cache."""

from __future__ import annotations

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
