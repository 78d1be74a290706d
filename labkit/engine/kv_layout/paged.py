"""``engine.kv.layout=paged``: a pool of blocks, and a block table for every request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from labkit.config.engine.kv_cache import FreeList, PrefixInsert
from labkit.cpu.precision.kv_dtypes import KV_GROUP
from labkit.engine import prefix_cache
from labkit.engine.attention.attention_protocol import NoAttention
from labkit.engine.attention.kernel_dispatch import KernelSwitches
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.block_pool import BlockPool
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_cache_interface import BlockTable, KVCache, KVCacheManager, StepAttention
from labkit.engine.prefix_cache import PrefixCache, eviction

if TYPE_CHECKING:
    from labkit import config
    from labkit.engine.attention.paged_backend_base import PagedBackend
    from labkit.engine.batch import Batch
    from labkit.engine.request import RequestState


def create(
    backend: PagedBackend,
    shapes: tuple[KVShape, ...],
    num_blocks: int,
    kv: config.KV,
    dtype: str,
    prefix_cache_name: str = "none",
    prefix_eviction: str = "lru",
    reuse_blocks: int = 1,
) -> KVCache:
    """Create a KV cache of ``num_blocks`` blocks, including the null block, in ``backend``.

    ``prefix_cache_name`` is the value of ``engine.prefix_cache``, ``prefix_eviction`` that of
    ``engine.prefix_eviction``. The length of a reused prefix is a multiple of ``reuse_blocks``
    blocks. Raises ``EngineError`` if the backend does not support the shapes or the dtype of the
    keys and values, or its kernels fail their check.
    """
    try:
        token_bytes = sum(shape.token_bytes(dtype) for shape in shapes)
        if shapes:
            backend.allocate(shapes, num_blocks, kv.block_size, dtype)
    except ValueError as error:
        raise EngineError(f"engine.kv.layout=paged: {error}") from error
    if kv.dtype.quantised:
        verify_quantised(dtype)
    pool = block_pool(num_blocks, kv)
    manager = PagedKVCacheManager(
        pool,
        prefix_cache.create(prefix_cache_name, pool, eviction.create(prefix_eviction)),
        reuse_blocks,
        block_bytes=kv.block_size * token_bytes,
        insert=kv.prefix_insert,
    )
    # A user's class may lack the method.
    manager.on_failed_step = getattr(backend, "clear_values", manager.on_failed_step)
    if not shapes:  # of a model without keys and values: blocks only count tokens
        step = StepAttention(NoAttention(), None, {"layout.paged": 1})
        return KVCache(manager, step.attention, lambda batch: (batch, step))
    backend.advances_metadata = True
    return KVCache(manager, backend, partial(plan_step, backend))


def block_pool(num_blocks: int, kv: config.KV) -> BlockPool:
    """Create a pool whose free list has the order of ``engine.kv.free_list``."""
    return BlockPool(num_blocks, kv.block_size, fifo=kv.free_list is FreeList.fifo)


@cache
def verify_quantised(dtype: str) -> None:
    """Raise ``EngineError`` unless the kernels quantise and read ``dtype`` with the right bits.

    A kernel that used the scale of another group, or lost a sign, would still return plausible
    numbers. Each sequence has a single token, so its attention output is its own value.
    """
    from labkit.cpu.precision import kv_quantization_reference
    from labkit.engine.attention.backends.cpu_backend import CpuBackend

    tokens, heads, head_dim = 6, 2, 2 * KV_GROUP
    backend = CpuBackend(KernelSwitches())
    backend.allocate([KVShape(heads, head_dim, head_dim)], tokens, 8, dtype)
    backend.bind(0, scale=1.0, heads=heads)
    metadata = backend.plan(
        block_tables=np.arange(tokens, dtype=np.int32)[:, None],
        seq_lens=np.ones(tokens, np.int32),
        cu_seqlens_q=np.arange(tokens + 1, dtype=np.int32),
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((tokens, heads, head_dim), np.float32) for _ in range(3))
    for rows in (k, v):  # groups of one sign, of a single number, and of zeros
        rows[0], rows[1], rows[2, :, ::2], rows[3, 0] = np.abs(rows[0]), -np.abs(rows[1]), 3.0, 0.0
    out = backend.forward(0, q, k, v, metadata)
    keys, values = (kv_quantization_reference.quantize(rows, dtype) for rows in (k, v))
    read = kv_quantization_reference.dequantize(values, dtype)
    for what, actual, expected in (
        ("the stored keys", backend.keys[0][:, 0], keys),
        ("the stored values", backend.values[0][:, 0], values),
        ("the values that attention reads", out, read),
    ):
        if not np.array_equal(actual, expected):
            raise EngineError(
                f"engine.kv.dtype={dtype}: {what} differ from their reference; set "
                "engine.kv.dtype=float32"
            )


class PagedKVCacheManager(KVCacheManager):
    """Reserves blocks of a pool for requests, which share the blocks of common prefixes.

    ``pool``: the pool of blocks. ``prefix_cache``: a prefix cache over the same pool (None: no
    prefix is reused). ``reuse_blocks``: the length of a reused prefix is a multiple of this number
    of blocks. ``block_bytes``: bytes of one block over all layers. ``insert``: when full blocks
    enter the prefix cache.
    """

    pool: BlockPool

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache | None = None,
        reuse_blocks: int = 1,
        block_bytes: int = 0,
        insert: PrefixInsert = PrefixInsert.computed,
    ) -> None:
        super().__init__(block_bytes // pool.block_size, pool)
        self.block_bytes = block_bytes
        self._prefix_cache = prefix_cache or PrefixCache(pool)
        self._reuse_blocks = reuse_blocks
        self._insert = insert
        # Requests whose blocks enter the prefix cache at their end, with their computed tokens.
        self._unoffered: dict[str, tuple[RequestState, int]] = {}
        self._num_cached_blocks: dict[str, int] = {}  # offered to the prefix cache
        # Returns how many blocks of a cached prefix can be reused (None: all).
        self._count_usable: Callable[[Sequence[int]], int] | None = None
        self._num_reservations = self._hit_tokens = self._queried_tokens = 0

    @property
    def reserved_bytes(self) -> int:
        return self.pool.num_used * self.block_bytes

    @property
    def total_bytes(self) -> int:
        return self.pool.capacity * self.block_bytes

    @property
    def capacity_tokens(self) -> int:
        return self.pool.capacity * self.pool.block_size

    def refusal_reason(self, num_tokens: int) -> str | None:
        needed = self.pool.blocks_for(num_tokens)
        if needed <= self.pool.capacity:
            return None
        return f"need {needed} KV blocks, but the pool has only {self.pool.capacity}"

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Reserve blocks, sharing cached ones; see ``KVCacheManager.reserve``."""
        request_id = state.request_id
        if request_id in self._tables:
            raise ValueError(f"request {request_id} has blocks already")
        shared = self._match_prefix(state)
        missing = self.pool.blocks_for(num_tokens) - len(shared)
        available = self.pool.num_free + self.pool.num_evictable - self.pool.count_evictable(shared)
        if missing + ceil(spare * self.pool.capacity) > available:
            return None
        self._prefix_cache.acquire(request_id, state.token_ids, shared)
        blocks = [*shared, *self._allocate(missing)]
        self._tables[request_id] = BlockTable(np.asarray(blocks, np.int32))
        self._num_cached_blocks[request_id] = len(shared)
        self._num_reservations += 1
        num_cached = len(shared) * self.pool.block_size
        # A preempted request may find its own tokens, and a scored one is not looked up.
        if not state.num_preemptions and state.request.params.prompt_logprobs is None:
            self._queried_tokens += state.num_tokens
            self._hit_tokens += num_cached
        return num_cached

    def _match_prefix(self, state: RequestState) -> list[int]:
        """Return the cached blocks of the request's prefix that end before its last known token.

        The list is empty for a request that wants log probabilities of its prompt, because the
        logits of every prompt token must be computed.
        """
        if state.request.params.prompt_logprobs is not None:
            return []
        max_blocks = (state.num_tokens - 1) // self.pool.block_size
        blocks = self._prefix_cache.match(state.token_ids, max_blocks)
        if self._count_usable is not None:
            return blocks[: self._count_usable(blocks)]
        return blocks[: len(blocks) - len(blocks) % self._reuse_blocks]

    @property
    def caches_prefixes(self) -> bool:
        """Whether prefixes are reused between requests."""
        return self._prefix_cache.name != "none"

    @property
    def reuse_tokens(self) -> int:
        """The length of a reused prefix is a multiple of this number of tokens."""
        return self._reuse_blocks * self.pool.block_size

    def find_cached_block(self, token_ids: Sequence[int], num_blocks: int) -> int | None:
        """Return the cached block at the end of a prefix of ``num_blocks`` blocks, or None."""
        blocks = self._prefix_cache.match(token_ids, num_blocks)
        return blocks[-1] if len(blocks) == num_blocks else None

    def cached_blocks(self) -> Iterator[int]:
        return self._prefix_cache.cached_blocks()

    def limit_reuse(
        self,
        count_usable: Callable[[Sequence[int]], int],
        on_evict: Callable[[Sequence[int]], None],
    ) -> None:
        """Limit the reuse of a cached prefix, for models that also have recurrent states.

        ``count_usable``: takes the cached blocks of a prefix and returns how many of them can be
        reused. ``on_evict``: is called with the ids of evicted blocks. Raises ``EngineError`` if
        blocks are cached at a request's end, after the snapshots that belong to them.
        """
        if self._insert is PrefixInsert.finish:
            raise EngineError(
                "engine.kv.prefix_insert=finish: this model has recurrent states, whose snapshots "
                "are kept for cached blocks only; leave engine.kv.prefix_insert=computed"
            )
        self._count_usable = count_usable
        self.pool.on_evict = on_evict

    def _allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks. Cached blocks are evicted only if too few blocks are free."""
        if count > self.pool.num_free:
            self._prefix_cache.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        blocks = self._tables[request_id].block_ids
        missing = self.pool.blocks_for(num_tokens) - len(blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_free + self.pool.num_evictable:
            return False
        new_blocks = np.asarray(self._allocate(missing), np.int32)
        self._tables[request_id] = BlockTable(np.concatenate([blocks, new_blocks]))
        return True

    def cache_blocks(self, state: RequestState) -> None:
        request_id = state.request_id
        self._computed.update(request_id, state.num_computed_tokens, self.pool.used_tokens)
        if self._insert is PrefixInsert.finish:
            self._unoffered[request_id] = state, state.num_computed_tokens
        else:
            self._offer(state, state.num_computed_tokens)

    def _offer(self, state: RequestState, num_computed: int) -> None:
        request_id, num_full = state.request_id, num_computed // self.pool.block_size
        if num_full <= self._num_cached_blocks[request_id]:
            return
        self._num_cached_blocks[request_id] = num_full
        blocks = self._tables[request_id].block_ids
        remap = self._prefix_cache.cache_blocks(
            request_id, state.token_ids, blocks[:num_full].tolist()
        )
        if remap:
            remapped = blocks.copy()
            for index, block in remap.items():
                remapped[index] = block
            self._tables[request_id] = BlockTable(remapped)

    def num_slots(self, table: BlockTable) -> int:
        return len(table) * self.pool.block_size

    def _free(self, request_id: str, table: BlockTable) -> None:
        if request_id in self._unoffered:
            self._tables[request_id] = table
            self._offer(*self._unoffered.pop(request_id))
            table = self._tables.pop(request_id)
        del self._num_cached_blocks[request_id]
        self._prefix_cache.release(request_id, table.block_ids.tolist())

    def clear(self) -> None:
        self._prefix_cache.clear()

    def forget_failed_step(self) -> None:
        """Empty the prefix cache, because the failed step's NaN may be in blocks cached before."""
        super().forget_failed_step()
        self._prefix_cache.clear()

    def counters(self) -> dict[str, float]:
        reserved = self._num_reservations
        return {
            "blocks.allocated": self.pool.allocated,
            "blocks.freed": self.pool.freed,
            "blocks.peak": self.pool.peak_used,
            "blocks.headroom": self.pool.capacity - self.pool.peak_used,
            "blocks.total": self.pool.capacity,
            "kv_block_bytes": self.block_bytes,
            "peak_kv_bytes": self.pool.peak_used * self.block_bytes,
            **super().counters(),
            f"free_list.{'fifo' if self.pool.fifo else 'lifo'}": self.pool.allocated,
            f"prefix_cache.{self._prefix_cache.name}": reserved,
            **({f"prefix_insert.{self._insert.value}": reserved} if self.caches_prefixes else {}),
            "prefix.queried_tokens": self._queried_tokens,
            "prefix.hit_tokens": self._hit_tokens,
            "prefix.evicted_blocks": self._prefix_cache.num_evicted,
            f"prefix_eviction.{self._prefix_cache.policy.name}": self._prefix_cache.num_evicted,
            "prefix.cached_blocks": self.pool.num_cached,
        }

    def reset_counters(self) -> None:
        self.pool.reset_counters()
        super().reset_counters()
        self._computed.reset(self.pool.used_tokens)
        self._prefix_cache.num_evicted = 0
        self._num_reservations = self._hit_tokens = self._queried_tokens = 0

    def check(self, running: set[str]) -> None:
        super().check(running)
        tables = [table.block_ids.tolist() for table in self._tables.values()]
        self.pool.check(tables, self._prefix_cache.cached_blocks())
        self._prefix_cache.check()


def plan_step(backend: PagedBackend, batch: Batch) -> tuple[Batch, StepAttention]:
    """Plan a step's attention. ``attention.map_us``: host time (us) of the resolver's maps."""
    metadata = backend.plan(
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        total_q=batch.total_q,
    )
    counters = {"layout.paged": 1, "attention.map_us": metadata.map_us}
    return batch, StepAttention(backend, metadata, counters)
