"""Prefix caches: none, hash or radix; the contract is in ``base``."""

from __future__ import annotations

from labkit.engine.block_pool import BlockPool
from labkit.engine.prefix_cache.base import NoPrefixCache, PrefixCache
from labkit.engine.prefix_cache.hash import HashPrefixCache
from labkit.engine.prefix_cache.radix import RadixPrefixCache

__all__ = ["HashPrefixCache", "NoPrefixCache", "PrefixCache", "RadixPrefixCache", "create"]


def create(name: str, pool: BlockPool, block_size: int) -> PrefixCache:
    """Make the prefix cache of that name over a pool."""
    if name == "none":
        return NoPrefixCache()
    if name == "hash":
        return HashPrefixCache(pool, block_size)
    return RadixPrefixCache(pool, block_size)
