"""Prefix caches: reuse of computed KV blocks between requests; none, hash or radix.

A prefix is a run of full blocks from a sequence's first token on. The prefix cache maps prefixes to
blocks. A request *locks* the prefix that it shares, so that it is not evicted, and offers its own
blocks as they are computed (``cache_blocks``). References belong to requests only (``BlockPool``);
a cached block without references is evictable. Invariants:

- A request that locks a block locks all blocks before it, and unlocks them tail first. So a
  cached block is always evicted before the blocks that lead to it.
- A block is locked exactly while a request references it, so an evictable block is not locked.
- A match compares tokens, never hashes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from labkit.engine.block_pool import BlockPool

Remap = Mapping[int, int]
"""Index in a request's block table -> the block that replaces it."""


NO_REMAP: Remap = {}


class PrefixCache:
    """Decides which blocks of a ``BlockPool`` stay cached; this base class caches none."""

    name = "none"
    num_evicted = 0  # blocks evicted for others since the last reset

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Return the cached blocks of the longest cached prefix, at most ``num_blocks``.

        The blocks are valid until the cache changes; ``lock`` them to keep them.
        """
        return []

    def lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Lock the first ``num_blocks`` blocks of ``match``; the request references them."""

    def cache_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> Remap:
        """Cache a request's full, computed blocks, those cached before included.

        Parameters
        ----------
        request_id
            A request that has called ``lock``, possibly with no block.
        token_ids
            Its tokens; at least ``len(block_ids)`` blocks of them.
        block_ids
            The blocks of these tokens; the request references all of them.

        Returns
        -------
        Remap
            Cached blocks with the same contents, which the request must reference and read
            instead of its own; they are locked for it.
        """
        return NO_REMAP

    def unlock(self, request_id: str) -> None:
        """Unlock the blocks of a request that has released its memory."""

    def evict(self, count: int) -> None:
        """Evict ``count`` evictable blocks, the least recently used and tails first.

        Raises
        ------
        ValueError
            Fewer blocks are evictable.
        """
        if count > 0:
            raise ValueError(f"evict({count}): no block is evictable")

    def clear(self) -> None:
        """Evict every block that is not locked."""

    def cached_blocks(self) -> Iterator[int]:
        """Yield every cached block that can be reached from the root."""
        return iter(())

    def check(self) -> None:
        """Raise ``AssertionError`` unless locks, eviction order and reachability are right."""


def create(name: str, pool: BlockPool, block_size: int) -> PrefixCache:
    """Create the prefix cache of ``engine.prefix_cache`` over a pool."""
    if name == "hash":
        from labkit.engine.prefix_cache.hash import HashPrefixCache

        return HashPrefixCache(pool, block_size)
    if name == "radix":
        from labkit.engine.prefix_cache.radix import RadixPrefixCache

        return RadixPrefixCache(pool, block_size)
    return PrefixCache()
