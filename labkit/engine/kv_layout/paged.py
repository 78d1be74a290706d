"""``paged``: blocks of a pool, each request a table of them; nothing is ever moved."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from labkit.engine import prefix_cache
from labkit.engine.block_pool import BlockPool
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_layout.kv_cache_manager import (
    BlockTable,
    KVCache,
    KVCacheManager,
    StepAttention,
)
from labkit.engine.kv_layout.kv_shape import KVShape
from labkit.engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from labkit import config
    from labkit.engine.attention.paged_backend import PagedBackend
    from labkit.engine.batch import Batch
    from labkit.engine.request import RequestState


def create(
    backend: PagedBackend,
    shapes: tuple[KVShape, ...],
    num_blocks: int,
    kv: config.KV,
    dtype: str,
    prefixes: str = "none",
    reuse_blocks: int = 1,
) -> KVCache:
    """Make a pool of so many blocks, the null block included; ``backend`` will own it.

    ``prefixes`` is the prefix cache's word, ``reuse_blocks`` of how many blocks a reused prefix
    is a multiple.

    Raises
    ------
    EngineError
        The backend cannot hold what the layers cache; one line.
    """
    try:
        backend.allocate(shapes, num_blocks, kv.block_size, dtype)
    except ValueError as error:
        raise EngineError(f"engine.kv.layout=paged: {error}") from error
    blocks = BlockPool(num_blocks)
    cache = PagedKVCacheManager(
        blocks,
        kv.block_size,
        prefix_cache.create(prefixes, blocks, kv.block_size),
        reuse_blocks,
        block_bytes=kv.block_size * sum(shape.token_bytes(dtype) for shape in shapes),
    )
    return KVCache(cache, PagedMemory(backend))


class PagedKVCacheManager(KVCacheManager):
    """Reserves blocks for requests, lets them share computed prefixes, takes them back.

    ``prefix_cache`` is over the same pool (None: nothing is reused), and used in multiples of
    ``reuse_blocks``; ``block_bytes``: of a block over all layers.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        prefix_cache: PrefixCache | None = None,
        reuse_blocks: int = 1,
        block_bytes: int = 0,
    ) -> None:
        super().__init__(block_bytes // block_size)
        self.pool = pool
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._prefixes = prefix_cache or PrefixCache()
        self._reuse_blocks = reuse_blocks
        self._published: dict[str, int] = {}
        self._reserved = self._hit_tokens = self._queried_tokens = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that requests hold now."""
        return self.pool.num_used * self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request can hold at most, alone."""
        return self.pool.capacity * self.block_size

    def refusal_reason(self, num_tokens: int) -> str | None:
        """Say why ``num_tokens`` tokens would not fit even alone; None: they would."""
        needed = self.blocks_for(num_tokens)
        if needed <= self.pool.capacity:
            return None
        return f"need {needed} KV blocks, the pool has {self.pool.capacity}"

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Hold blocks for a request's first ``num_tokens`` tokens, cached ones where it can.

        What is found computed are whole blocks; see ``KVCacheManager.reserve``.
        """
        request_id = state.request_id
        if request_id in self._tables:
            raise ValueError(f"request {request_id} holds blocks already")
        shared = self._match(state)
        missing = self.blocks_for(num_tokens) - len(shared)
        available = self.pool.num_free + self.pool.num_evictable - self.pool.count_evictable(shared)
        if missing + ceil(spare * self.pool.capacity) > available:
            return None
        self.pool.touch(shared)
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
        """Hold as many more blocks as are missing; see ``KVCacheManager.grow``."""
        blocks = self._tables[request_id].block_ids
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_free + self.pool.num_evictable:
            return False
        more = np.asarray(self._allocate(missing), np.int32)
        self._tables[request_id] = BlockTable(np.concatenate([blocks, more]))
        return True

    def cache_blocks(self, state: RequestState) -> None:
        """Offer the full, computed blocks; see ``KVCacheManager.cache_blocks``."""
        request_id = state.request_id
        held = self.pool.num_used * self.block_size
        self._used.update(request_id, state.num_computed_tokens, held)
        full = state.num_computed_tokens // self.block_size
        if full <= self._published[request_id]:
            return
        self._published[request_id] = full
        blocks = self._tables[request_id].block_ids
        remap = self._prefixes.cache_blocks(request_id, state.token_ids, blocks[:full].tolist())
        if remap:
            changed = blocks.copy()
            for index, block in remap.items():
                changed[index] = block
            self.pool.touch(remap.values())
            self.pool.free([int(blocks[index]) for index in remap])
            self._tables[request_id] = BlockTable(changed)

    def slots(self, table: BlockTable) -> int:
        """Return for how many tokens its blocks are, shared ones included."""
        return len(table) * self.block_size

    def _free(self, request_id: str, table: BlockTable) -> None:
        del self._published[request_id]
        self.pool.free(table.block_ids.tolist())
        self._prefixes.unlock(request_id)

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
            **super().counters(),
            f"prefix_cache.{self._prefixes.name}": self._reserved,
            "prefix.queried_tokens": self._queried_tokens,
            "prefix.hit_tokens": self._hit_tokens,
            "prefix.evicted_blocks": self._prefixes.num_evicted,
            "prefix.cached_blocks": self.pool.num_cached,
        }

    def reset_counters(self) -> None:
        """Start counting anew; peaks restart from what is held."""
        self.pool.reset_counters()
        super().reset_counters()
        self._used.reset(self.pool.num_used * self.block_size)
        self._prefixes.num_evicted = 0
        self._reserved = self._hit_tokens = self._queried_tokens = 0

    def check(self, running: set[str]) -> None:
        """Check the pool and the prefix cache too; see ``KVCacheManager.check``."""
        super().check(running)
        tables = [table.block_ids.tolist() for table in self._tables.values()]
        self.pool.check(tables, self._prefixes.cached_blocks())
        self._prefixes.check()


class PagedMemory:
    """The pools of a backend of paged attention."""

    def __init__(self, backend: PagedBackend) -> None:
        self.attention = backend
        backend.advances_metadata = True

    def plan(self, batch: Batch) -> tuple[Batch, StepAttention]:
        """Build what the layers share; the batch stays as it is.

        Counted: the step, and the host time (us) of the resolver's maps.
        """
        plan = self.attention.plan(
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            total_q=batch.total_q,
        )
        counters = {"layout.paged": 1, "attention.map_us": plan.map_us}
        return batch, StepAttention(self.attention, plan, counters)
