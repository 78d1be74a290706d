"""The KV slots and blocks that requests of given lengths need in each KV layout."""

from __future__ import annotations

from collections.abc import Sequence

from labkit import config

# The padded layout grows in steps of this many tokens, as mlx_lm's caches do, and by default the
# contiguous layout does too (engine.kv.growth_step).
CACHE_STEP_TOKENS = 256


def round_up_to_step(tokens: int, step: int = CACHE_STEP_TOKENS) -> int:
    """Round a number of tokens up to a multiple of ``step``."""
    return -(-tokens // step) * step


def slots_for(kv: config.KV, lengths: Sequence[int]) -> int:
    """Return the KV slots (tokens) that requests of ``lengths`` tokens occupy together."""
    if kv.layout is config.KVLayout.padded:
        return len(lengths) * round_up_to_step(max(lengths, default=0))
    if kv.layout is config.KVLayout.contiguous:
        return sum(round_up_to_step(max(n, kv.set_aside or 0), kv.growth_step) for n in lengths)
    return sum(-(-n // kv.block_size) * kv.block_size for n in lengths)


def blocks_for(kv: config.KV, lengths: Sequence[int]) -> int:
    """Return the number of KV blocks that requests of ``lengths`` tokens need together.

    In the paged layout the number includes the null block.
    """
    null_block = kv.layout is config.KVLayout.paged
    return -(-slots_for(kv, lengths) // kv.block_size) + null_block
