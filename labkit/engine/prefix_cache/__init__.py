"""Prefix caches (none, hash, radix), which reuse computed KV blocks between requests.

A prefix is a run of full blocks that starts at a sequence's first token. The prefix cache maps
prefixes to blocks. A request *acquires* the prefix that it shares, to protect it from eviction, and
offers its own blocks when they are computed (``cache_blocks``). Only requests have references to
blocks (``BlockPool``). A cached block without references is evictable. The pool counts references
per block. The cache counts locks per entry or node, and keeps the order of eviction.

References and locks change together, in one method each:

    acquire         pool.touch; lock
    cache_blocks    insert; if blocks are remapped, pool.touch, then pool.free of the old ones
    release         pool.free; unlock

Invariants between these calls:

- A request that locks a block locks all blocks before it too, and unlocks the last block first. So
  a cached block is always evicted before the earlier blocks of its prefix.
- A block is locked exactly while a request references it, so an evictable block is not locked.
- A match compares tokens, never hashes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from labkit.engine.block_pool import BlockPool
from labkit.engine.prefix_cache.eviction import LRU, EvictionPolicy

Remap = Mapping[int, int]
"""Index in a request's block table -> the block that replaces it."""


NO_REMAP: Remap = {}


class PrefixCache:
    """Decides which blocks of a ``BlockPool`` stay cached. This base class caches no blocks.

    A subclass overrides ``_lock``, ``_insert``, ``_unlock`` and ``_remove``, and the methods that
    it needs from ``match``, ``cached_blocks`` and ``check``.
    """

    name = "none"

    def __init__(self, pool: BlockPool, policy: EvictionPolicy | None = None) -> None:
        self._pool = pool
        self.policy = policy or LRU
        self._num_releases = 0
        self.num_evicted = 0  # since the last reset, by ``evict``

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Return the blocks of the longest cached prefix. They are kept if ``acquire`` follows."""
        return []

    def acquire(self, request_id: str, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Reference and lock, once per request, the first blocks that ``match`` returned."""
        self._pool.touch(blocks)
        self._lock(request_id, token_ids, len(blocks))

    def _lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        pass

    def cache_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> Remap:
        """Cache a request's full, computed blocks.

        ``block_ids`` are all of them from the first on, including those cached before. The request
        must have called ``acquire`` and reference them, and its ``token_ids`` must fill them.
        Returns cached blocks with the same contents, which the request must read instead of its own
        blocks. It references and locks these now, and no longer its own.
        """
        remap = self._insert(request_id, token_ids, block_ids)
        if remap:
            self._pool.touch(remap.values())
            self._pool.free([block_ids[index] for index in remap])
        return remap

    def _insert(self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> Remap:
        return NO_REMAP

    def release(self, request_id: str, blocks: Sequence[int]) -> None:
        """Drop a request's references to all of its ``blocks``, and its locks."""
        self._pool.free(blocks)
        self._num_releases += 1
        self._unlock(request_id)

    def _unlock(self, request_id: str) -> None:
        pass

    def evict(self, count: int) -> None:
        """Evict blocks in the policy's order, or raise ``ValueError`` if too few are evictable."""
        evictable = self._pool.num_evictable
        if count > evictable:
            raise ValueError(f"evict({count}): the number of evictable blocks is {evictable}")
        self._remove(count)
        self.num_evicted += count

    def clear(self) -> None:
        """Evict every block that is not locked."""
        self._remove(self._pool.num_evictable)

    def _remove(self, count: int) -> None:
        pass

    def cached_blocks(self) -> Iterator[int]:
        """Yield every cached block that can be reached from the root."""
        return iter(())

    def check(self) -> None:
        """Raise ``AssertionError`` unless locks, eviction order and reachability are right."""


def create(name: str, pool: BlockPool, policy: EvictionPolicy | None = None) -> PrefixCache:
    """Create the prefix cache of ``engine.prefix_cache`` over a pool (``policy`` None: LRU)."""
    if name == "hash":
        from labkit.engine.prefix_cache.hash_table import HashPrefixCache

        return HashPrefixCache(pool, policy)
    if name == "radix":
        from labkit.engine.prefix_cache.radix_tree import RadixPrefixCache

        return RadixPrefixCache(pool, policy)
    return PrefixCache(pool)
