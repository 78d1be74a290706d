"""What every prefix cache offers: reuse of computed KV blocks between requests.

A prefix is a run of full blocks from a sequence's first token on. The cache knows which
blocks hold which prefix; a request *locks* the prefix that it shares, so that nothing it
relies on is evicted, and *publishes* its own blocks as they are computed. Invariants:

- Whoever locks a block's prefix locks all prefixes of it, and releases them tail first.
  So no cached block ever outlives the blocks that lead to it.
- Nothing is found by its hash alone: tokens are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

Remap = Mapping[int, int]
"""Index in a request's block table -> the block to read there from now on."""


class PrefixCache(Protocol):
    """Owns which blocks of a ``BlockPool`` are kept, and its own shares of them."""

    name: str
    evicted: int  # blocks given back for want of room, since the last reset

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Return the cached blocks of the longest prefix, at most ``num_blocks`` of them.

        Changes nothing; what it returns is good until the cache is next changed.
        """

    def lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hold the first ``num_blocks`` blocks of a prefix that ``match`` found."""

    def publish(self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> Remap:
        """Offer a request's full, computed blocks, the ones published before included.

        Parameters
        ----------
        request_id
            One that holds a lock, be it of no block.
        token_ids
            Its tokens; at least ``len(block_ids)`` blocks of them.
        block_ids
            The blocks that hold them; the request owns them all.

        Returns
        -------
        Remap
            Blocks that the request should read instead of its own, which hold the same.
            The cache holds them until ``unlock``.
        """

    def unlock(self, request_id: str) -> None:
        """Let go of what a request holds; its published blocks can be evicted then."""

    def evict(self, count: int) -> None:
        """Give ``count`` idle blocks back to the pool, least recently used and tails first.

        Raises
        ------
        ValueError
            Fewer are idle.
        """

    def clear(self) -> None:
        """Forget every block that no request holds."""

    def kept(self) -> Iterator[int]:
        """Yield every cached block, each found by walking from the root."""

    def shares(self) -> Iterator[Sequence[int]]:
        """Yield the blocks that the cache itself owns for its locks."""

    def check(self) -> None:
        """Raise ``AssertionError`` unless locks, order and reachability hold."""
