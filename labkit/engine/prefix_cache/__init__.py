"""Prefix caches: reuse of computed KV blocks between requests; none, hash or radix.

A prefix is a run of full blocks from a sequence's first token on. The cache knows which
blocks hold which prefix; a request *locks* the prefix that it shares, so that nothing it
relies on is evicted, and *publishes* its own blocks as they are computed. Only requests
own blocks (``BlockPool``): the cache keeps them beyond their last owner. Invariants:

- Whoever locks a block's prefix locks all prefixes of it, and releases them tail first.
  So no cached block ever outlives the blocks that lead to it.
- A block is locked exactly while a request owns it, so idle blocks can be evicted.
- Nothing is found by its hash alone: tokens are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from labkit.engine.block_pool import BlockPool

Remap = Mapping[int, int]
"""Index in a request's block table -> the block to read there from now on."""


NOTHING: Remap = {}


class PrefixCache:
    """Decides which blocks of a ``BlockPool`` are kept; as it is (``none``), no block."""

    name = "none"
    num_evicted = 0  # blocks given back for want of room, since the last reset

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Return the cached blocks of the longest prefix, at most ``num_blocks`` of them.

        Changes nothing; what it returns is good until the cache is next changed.
        """
        return []

    def lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Lock the first ``num_blocks`` blocks that ``match`` found; the request owns them."""

    def cache_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> Remap:
        """Offer a request's full, computed blocks, the ones published before included.

        Parameters
        ----------
        request_id
            One that has locked, be it no block.
        token_ids
            Its tokens; at least ``len(block_ids)`` blocks of them.
        block_ids
            The blocks that hold them; the request owns them all.

        Returns
        -------
        Remap
            Blocks that hold the same, which the request must own and read instead of its
            own; they are locked for it.
        """
        return NOTHING

    def unlock(self, request_id: str) -> None:
        """Unlock all of a request that owns nothing any more."""

    def evict(self, count: int) -> None:
        """Give ``count`` idle blocks back to the pool, least recently used and tails first.

        Raises
        ------
        ValueError
            Fewer are idle.
        """
        if count > 0:
            raise ValueError(f"evict({count}): no block is idle")

    def clear(self) -> None:
        """Forget every block that no request holds."""

    def cached_blocks(self) -> Iterator[int]:
        """Yield every cached block, each found by walking from the root."""
        return iter(())

    def check(self) -> None:
        """Raise ``AssertionError`` unless locks, order and reachability hold."""


def create(name: str, pool: BlockPool, block_size: int) -> PrefixCache:
    """Make the prefix cache of that name over a pool."""
    if name == "hash":
        from labkit.engine.prefix_cache.hash import HashPrefixCache

        return HashPrefixCache(pool, block_size)
    if name == "radix":
        from labkit.engine.prefix_cache.radix import RadixPrefixCache

        return RadixPrefixCache(pool, block_size)
    return PrefixCache()
