"""How much memory requests of so many tokens need, by the layout of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from labkit import config

CACHE_STEP_TOKENS = (
    256  # tokens: without blocks, memory comes in steps of it, as in mlx_lm's caches
)


def round_up_to_step(tokens: int) -> int:
    """Round up to whole steps."""
    return -(-tokens // CACHE_STEP_TOKENS) * CACHE_STEP_TOKENS


def slots_for(kv: config.KV, lengths: Sequence[int]) -> int:
    """Return the tokens of memory that requests of these lengths take together."""
    if kv.layout is config.KVLayout.padded:
        return len(lengths) * round_up_to_step(max(lengths, default=0))
    if kv.layout is config.KVLayout.contiguous:
        return sum(round_up_to_step(max(n, kv.set_aside or 0)) for n in lengths)
    return sum(-(-n // kv.block_size) * kv.block_size for n in lengths)


def blocks_for(kv: config.KV, lengths: Sequence[int]) -> int:
    """Return the same in blocks, of which one is the paged pool's null block."""
    null_block = kv.layout is config.KVLayout.paged
    return -(-slots_for(kv, lengths) // kv.block_size) + null_block
