"""``engine.prefix_cache=none``: every request computes all of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.engine.prefix_cache.base import Remap

NOTHING: Remap = {}


class NoPrefixCache:
    """Finds nothing and keeps nothing."""

    name = "none"
    evicted = 0

    def match(self, token_ids: Sequence[int], num_blocks: int) -> list[int]:
        """Find nothing."""
        return []

    def lock(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hold nothing."""

    def publish(self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> Remap:
        """Keep nothing."""
        return NOTHING

    def unlock(self, request_id: str) -> None:
        """Have nothing to let go of."""

    def evict(self, count: int) -> None:
        """Give nothing back."""
        if count > 0:
            raise ValueError(f"evict({count}): no block is idle")

    def clear(self) -> None:
        """Have nothing to forget."""

    def kept(self) -> Iterator[int]:
        """Yield nothing."""
        return iter(())

    def check(self) -> None:
        """Nothing can be wrong."""
