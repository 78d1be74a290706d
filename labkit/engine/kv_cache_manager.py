"""Which request holds which KV blocks."""

from __future__ import annotations

from math import ceil

import numpy as np

from labkit.engine.block_pool import BlockPool
from labkit.engine.kv_layout.accounting import UsedTokens
from labkit.engine.kv_layout.kv_cache import BlockTable
from labkit.engine.prefix_cache import NoPrefixCache, PrefixCache
from labkit.engine.request import RequestState


class KVCacheManager:
    """Reserves blocks for requests, lets them share computed prefixes, takes them back.

    This is the ``KVCache`` of the paged layout.

    Parameters
    ----------
    pool
        The blocks.
    block_size
        Tokens in a block.
    prefix_cache
        Over the same pool; None: nothing is reused.
    reuse_blocks
        Prefixes are reused in multiples of this many blocks.
    block_bytes
        Bytes of a block over all layers.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        reuse_blocks: int = 1,
        block_bytes: int = 0,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._prefixes: PrefixCache = prefix_cache or NoPrefixCache()
        self._reuse_blocks = reuse_blocks
        self._tables: dict[str, BlockTable] = {}
        self._published: dict[str, int] = {}
        self._reserved = self._hit_tokens = self._queried_tokens = 0
        self._used = UsedTokens()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.block_bytes // self.block_size

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that requests hold now."""
        return self.pool.num_used * self.block_bytes

    @property
    def _held_tokens(self) -> int:
        return self.pool.num_used * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def refusal(self, num_tokens: int) -> str | None:
        """Say why ``num_tokens`` tokens would not fit even alone; None: they would."""
        needed = self.blocks_for(num_tokens)
        if needed <= self.pool.capacity:
            return None
        return f"need {needed} KV blocks, the pool has {self.pool.capacity}"

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Hold blocks for a request's first ``num_tokens`` tokens, cached ones where it can.

        ``spare`` is the share of all blocks that must be left for others.

        Returns
        -------
        int or None
            How many of its tokens are computed already: whole blocks, and never the last
            token known, which must be computed to sample the next. None, and nothing
            changed, if too few blocks can be had.

        Raises
        ------
        ValueError
            The request holds blocks already.
        """
        request_id = state.request_id
        if request_id in self._tables:
            raise ValueError(f"request {request_id} holds blocks already")
        shared = self._match(state)
        missing = self.blocks_for(num_tokens) - len(shared)
        available = self.pool.num_free + self.pool.num_idle - self.pool.idle_among(shared)
        if missing + ceil(spare * self.pool.capacity) > available:
            return None
        self.pool.share(shared)
        self._prefixes.lock(request_id, state.token_ids, len(shared))
        blocks = [*shared, *self._allocate(missing)]
        self._tables[request_id] = BlockTable(np.asarray(blocks, np.int32))
        self._published[request_id] = len(shared)
        self._reserved += 1
        self._queried_tokens += state.num_tokens
        self._hit_tokens += len(shared) * self.block_size
        return len(shared) * self.block_size

    def _match(self, state: RequestState) -> list[int]:
        most = (state.num_tokens - 1) // self.block_size
        found = self._prefixes.match(state.token_ids, most)
        return found[: len(found) - len(found) % self._reuse_blocks]

    def _allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks that can be had, evicting only what is needed."""
        if count > self.pool.num_free:
            self._prefixes.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Hold blocks for a request's first ``num_tokens`` tokens, those it has included.

        False, and nothing changed, if too few blocks can be had.
        """
        blocks = self._tables[request_id].block_ids
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_free + self.pool.num_idle:
            return False
        more = np.asarray(self._allocate(missing), np.int32)
        self._tables[request_id] = BlockTable(np.concatenate([blocks, more]))
        return True

    def publish(self, state: RequestState) -> None:
        """Offer a running request's full, computed blocks for reuse.

        To be called after ``num_computed_tokens`` has advanced over tokens that are final:
        a drafted token that may yet be rejected must not be among them.
        """
        request_id = state.request_id
        self._used.note(request_id, state.num_computed_tokens, self._held_tokens)
        full = state.num_computed_tokens // self.block_size
        if full <= self._published[request_id]:
            return
        self._published[request_id] = full
        blocks = self._tables[request_id].block_ids
        remap = self._prefixes.publish(request_id, state.token_ids, blocks[:full].tolist())
        if remap:
            changed = blocks.copy()
            for index, block in remap.items():
                changed[index] = block
            self.pool.share(remap.values())
            self.pool.free([int(blocks[index]) for index in remap])
            self._tables[request_id] = BlockTable(changed)

    def table(self, request_id: str) -> BlockTable:
        """Return the blocks that a request holds."""
        return self._tables[request_id]

    def release(self, request_id: str) -> None:
        """Let go of what a request holds; one that holds nothing is ignored."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            del self._published[request_id]
            self.pool.free(table.block_ids.tolist())
            self._prefixes.unlock(request_id)
            self._used.forget(request_id)

    def staying(self) -> tuple[str, ...]:
        """Nothing is computed for requests that ended."""
        return ()

    def clear(self) -> None:
        """Forget every cached prefix that no request holds."""
        self._prefixes.clear()

    def counters(self) -> dict[str, float]:
        """Return what blocks and prefixes did since the last reset."""
        return {
            "blocks.allocated": self.pool.allocated,
            "blocks.freed": self.pool.freed,
            "blocks.peak": self.pool.peak_used,
            "blocks.headroom": self.pool.capacity - self.pool.peak_used,
            "blocks.total": self.pool.capacity,
            "kv_block_bytes": self.block_bytes,
            "peak_kv_bytes": self.pool.peak_used * self.block_bytes,
            "kv_used_bytes": self._used.peak * self.block_bytes / self.block_size,
            f"prefix_cache.{self._prefixes.name}": self._reserved,
            "prefix.queried_tokens": self._queried_tokens,
            "prefix.hit_tokens": self._hit_tokens,
            "prefix.evicted_blocks": self._prefixes.evicted,
            "prefix.cached_blocks": self.pool.num_kept,
        }

    def reset_counters(self) -> None:
        """Start counting anew; peaks restart from what is held."""
        self.pool.reset_counters()
        self._used.reset(self._held_tokens)
        self._prefixes.evicted = 0
        self._reserved = self._hit_tokens = self._queried_tokens = 0

    def check(self, running: set[str]) -> None:
        """Raise ``AssertionError`` unless exactly the ``running`` requests own blocks."""
        if set(self._tables) != running:
            raise AssertionError(f"blocks are held by {set(self._tables)}, running are {running}")
        tables = [table.block_ids.tolist() for table in self._tables.values()]
        self.pool.check(tables, self._prefixes.kept())
        self._prefixes.check()
