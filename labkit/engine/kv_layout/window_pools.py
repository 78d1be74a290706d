"""``engine.kv.window_pools``: a pool of blocks for the layers of each sliding window.

With one pool, a block has the keys and values of its tokens in all layers, so a layer with a window
keeps what it can never read again. Here, as in the KV cache groups of vLLM's hybrid manager, layers
that see the same keys are a group with a pool, block tables and a backend of their own:

    group     layers                        a request holds
    full      those without a window        all its tokens; the layout's own manager
    window W  those with a window of W      the last W tokens, and what the next step writes

The scheduler sees one manager, which decides by the full group. A window's blocks are allocated
chunk by chunk (``grows_by_chunk``), not when the request is admitted, and freed as soon as the
tokens of a step are final. So a request never holds the window's share of a long prompt.

A query at position ``p`` sees the keys ``p - window + 1 .. p``. Once the tokens before ``n`` are
final, every later query has position ``n`` or more, so blocks that end before ``n - window + 1``
are freed. In the block table the null block stands in their place, so that the block of a position
has the same index in every table. No kernel reads it: keys outside the window are skipped or
masked.

The memory is that of ``num_blocks`` blocks of all layers. A window's pool is as large as the
running requests can ever fill, and the full group has the rest (``split_blocks``). Should a
window's pool be full nevertheless, ``grow`` fails and the scheduler preempts, as for any block.

A captured graph of decode steps has one block table, so steps are not replayed
(``replay_obstacle``).

Draft tokens are written to blocks that are allocated with their chunk (``num_lookahead_tokens``).
Rejected drafts need no freed block: blocks are freed for final tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.attention_protocol import CacheGroupAttention
from labkit.engine.block_pool import NULL_BLOCK, BlockPool
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_cache_interface import (
    BlockTable,
    ComputedTokenCount,
    KVCache,
    KVCacheManager,
    StepAttention,
)
from labkit.engine.kv_layout import paged
from labkit.engine.memory_budget.required_kv_slots import StepLimits, split_blocks

if TYPE_CHECKING:
    from labkit import config
    from labkit.engine.attention.kv_and_state_shapes import KVShape
    from labkit.engine.attention.paged_backend_base import PagedBackend
    from labkit.engine.batch import Batch
    from labkit.engine.request import RequestState

OPTION = "engine.kv.window_pools=true"
BlockIds = NDArray[np.int32]
NO_BLOCKS: BlockIds = np.zeros(0, np.int32)


def check_windows(windows: Sequence[int | None], model_type: str) -> None:
    """Raise ``EngineError`` unless a layer has a sliding window."""
    if all(window is None for window in windows):
        raise EngineError(
            f"{OPTION}: no layer of model_type={model_type} has a sliding window; set "
            "engine.kv.window_pools=false"
        )


def create(
    create_backend: Callable[[], PagedBackend],
    shapes: Sequence[KVShape],
    windows: Sequence[int | None],
    num_blocks: int,
    kv: config.KV,
    dtype: str,
    limits: StepLimits,
) -> KVCache:
    """Create the pools of all groups: the memory of ``num_blocks`` blocks of all layers.

    ``windows`` has the window of each layer (None: it sees all keys). Raises ``EngineError`` as
    ``paged.create``.
    """
    kinds = [None, *sorted({window for window in windows if window is not None})]
    layers = [[i for i, window in enumerate(windows) if window == kind] for kind in kinds]
    sizes = [kv.block_size * sum(shapes[i].token_bytes(dtype) for i in own) for own in layers]
    pairs = list(zip(kinds[1:], sizes[1:], strict=True))
    most = [(size, limits.window_blocks(window or 0, kv.block_size)) for window, size in pairs]
    num_full, counts = split_blocks(num_blocks, sizes[0], most)
    backends = [create_backend() for _ in kinds]
    caches = [
        paged.create(backend, tuple(shapes[i] for i in own), count, kv, dtype)
        for backend, own, count in zip(backends, layers, [num_full, *counts], strict=True)
    ]
    groups = [
        WindowBlocks(paged.block_pool(count, kv), window or 0, size)
        for (window, size), count in zip(pairs, counts, strict=True)
    ]
    places = {i: (g, place) for g, own in enumerate(layers) for place, i in enumerate(own)}
    attention = CacheGroupAttention(backends, [places[i] for i in range(len(shapes))])
    manager = WindowedKVCacheManager(caches[0].manager, groups, limits)

    def clear_values() -> None:
        for cache in caches:
            cache.manager.on_failed_step()

    manager.on_failed_step = clear_values
    return KVCache(manager, attention, partial(plan_step, attention))


class WindowBlocks:
    """The block tables of all requests in the layers of one window (a KV cache group).

    ``pool``: the pool of the group's blocks. ``window``: the number of keys that a query sees, its
    own included. ``block_bytes``: bytes of one block over the group's layers.
    """

    def __init__(self, pool: BlockPool, window: int, block_bytes: int) -> None:
        self.pool = pool
        self.window = window
        self.block_bytes = block_bytes
        self._tables: dict[str, BlockIds] = {}
        self._num_freed: dict[str, int] = {}  # blocks at the front of a table that were freed
        self.num_slid = 0  # blocks freed because the window moved on

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.pool.block_size

    @property
    def reserved_bytes(self) -> int:
        return self.pool.num_used * self.block_bytes

    def open(self, request_id: str) -> None:
        self._tables[request_id] = NO_BLOCKS
        self._num_freed[request_id] = 0

    def table(self, request_id: str) -> BlockIds:
        """Return a request's immutable table of block ids. Freed blocks are ``NULL_BLOCK``."""
        return self._tables[request_id]

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Return the number of blocks to allocate before the first ``num_tokens`` tokens fit."""
        return max(0, self.pool.blocks_for(num_tokens) - len(self._tables[request_id]))

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Allocate the missing blocks, or none, and raise ``ValueError``, if too few are free."""
        missing = self.num_missing(request_id, num_tokens)
        if missing:
            blocks = np.asarray(self.pool.allocate(missing), np.int32)
            self._tables[request_id] = np.concatenate([self._tables[request_id], blocks])

    def slide(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks that no query after the first ``num_tokens`` tokens sees."""
        behind = max(0, num_tokens - self.window + 1) // self.pool.block_size
        freed = self._num_freed[request_id]
        if behind <= freed:
            return
        table = self._tables[request_id].copy()
        self.pool.free(table[freed:behind].tolist())
        table[freed:behind] = NULL_BLOCK
        self._tables[request_id] = table
        self._num_freed[request_id] = behind
        self.num_slid += behind - freed

    def num_held_tokens(self, request_id: str, num_tokens: int) -> int:
        """Return how many of the first ``num_tokens`` tokens are in blocks that the request has."""
        return num_tokens - self._num_freed[request_id] * self.pool.block_size

    def release(self, request_id: str) -> None:
        self.pool.free(self._held(request_id))
        del self._tables[request_id], self._num_freed[request_id]

    def _held(self, request_id: str) -> list[int]:
        blocks: list[int] = self._tables[request_id][self._num_freed[request_id] :].tolist()
        return blocks

    def check(self, running: set[str]) -> None:
        """Raise ``AssertionError`` unless the ``running`` requests have all tables and blocks."""
        if set(self._tables) != running:
            raise AssertionError("the tables of a window are not those of the running requests")
        self.pool.check([self._held(request_id) for request_id in self._tables])

    def reset_counters(self) -> None:
        self.pool.reset_counters()
        self.num_slid = 0


class WindowedKVCacheManager(KVCacheManager):
    """Reserves blocks for the layers without a window in a manager, for the others in groups."""

    grows_by_chunk = True

    def __init__(
        self, full: KVCacheManager, groups: Sequence[WindowBlocks], limits: StepLimits
    ) -> None:
        super().__init__(full.token_bytes + sum(group.token_bytes for group in groups), full.pool)
        self._full = full
        self._groups = groups
        self._limits = limits
        self._held = [ComputedTokenCount() for _ in groups]
        self._peak_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        return self._full.reserved_bytes + sum(group.reserved_bytes for group in self._groups)

    @property
    def total_bytes(self) -> int:
        windows = (group.pool.capacity * group.block_bytes for group in self._groups)
        return self._full.total_bytes + sum(windows)

    @property
    def capacity_tokens(self) -> int:
        return self._full.capacity_tokens

    def refusal_reason(self, num_tokens: int) -> str | None:
        return self._full.refusal_reason(num_tokens)

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Reserve blocks in the layers without a window; see ``KVCacheManager.reserve``.

        The windows' pools must have room for the first chunk, because a request that is preempted
        by its first chunk would be admitted again in the same step, without end.
        """
        chunk = min(num_tokens, self._limits.num_tokens + self._limits.num_lookahead_tokens)
        if any(g.pool.blocks_for(chunk) > g.pool.num_free for g in self._groups):
            return None
        num_cached = self._full.reserve(state, num_tokens, spare)
        if num_cached is not None:
            for group in self._groups:
                group.open(state.request_id)
            self._update(state.request_id)
        return num_cached

    def grow(self, request_id: str, num_tokens: int) -> bool:
        if not self._full.grow(request_id, num_tokens):
            return False
        slots = self._full.num_slots(self._full.table(request_id))
        wanted = min(num_tokens + self._limits.num_lookahead_tokens, slots)
        fits = all(g.num_missing(request_id, wanted) <= g.pool.num_free for g in self._groups)
        if fits:
            for group in self._groups:
                group.grow(request_id, wanted)
        self._update(request_id)  # the full group has grown in either case
        return fits

    def cache_blocks(self, state: RequestState) -> None:
        self._full.cache_blocks(state)
        request_id, num_tokens = state.request_id, state.num_computed_tokens
        for group, held in zip(self._groups, self._held, strict=True):
            group.slide(request_id, num_tokens)
            held.update(
                request_id, group.num_held_tokens(request_id, num_tokens), group.pool.used_tokens
            )
        self._update(request_id)

    def _update(self, request_id: str) -> None:
        """Update a request's block table, unless its blocks are the same, and the peak of bytes."""
        full = self._full.table(request_id).block_ids
        windows = tuple(group.table(request_id) for group in self._groups)
        last = self._tables.get(request_id)
        if last is None or any(
            new is not old
            for new, old in zip((full, *windows), (last.block_ids, *last.windows), strict=True)
        ):
            self._tables[request_id] = BlockTable(full, windows)
        self._peak_bytes = max(self._peak_bytes, self.reserved_bytes)

    def used_bytes(self, num_tokens: int) -> int:
        return self._full.used_bytes(num_tokens) + sum(
            min(group.reserved_bytes, num_tokens * group.token_bytes) for group in self._groups
        )

    def num_slots(self, table: BlockTable) -> int:
        return self._full.num_slots(table)

    def _free(self, request_id: str, table: BlockTable) -> None:
        self._full.release(request_id)
        for group, held in zip(self._groups, self._held, strict=True):
            group.release(request_id)
            held.remove(request_id)

    def check(self, running: set[str]) -> None:
        super().check(running)
        self._full.check(running)
        for group in self._groups:
            group.check(running)

    def counters(self) -> dict[str, float]:
        full = self._full.counters()
        used = full["kv_used_bytes"] + sum(
            held.peak * group.token_bytes
            for group, held in zip(self._groups, self._held, strict=True)
        )
        return {
            **full,
            "window_pools.freed_blocks": sum(group.num_slid for group in self._groups),
            "window_pools.peak_blocks": sum(group.pool.peak_used for group in self._groups),
            "window_pools.total_blocks": sum(group.pool.capacity for group in self._groups),
            "peak_kv_bytes": self._peak_bytes,
            "kv_used_bytes": min(used, self._peak_bytes),
        }

    def reset_counters(self) -> None:
        super().reset_counters()
        self._full.reset_counters()
        for group, held in zip(self._groups, self._held, strict=True):
            group.reset_counters()
            held.reset(group.pool.used_tokens)
        self._peak_bytes = self.reserved_bytes


def plan_step(attention: CacheGroupAttention, batch: Batch) -> tuple[Batch, StepAttention]:
    """Plan a step's attention in each group that has layers. The batch is returned unchanged."""
    tables = (batch.block_tables, *batch.window_tables)
    metadata = tuple(
        backend.plan(
            block_tables=own,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            total_q=batch.total_q,
        )
        if backend.keys
        else None
        for backend, own in zip(attention.backends, tables, strict=True)
    )
    map_us = sum(own.map_us for own in metadata if own is not None)
    return batch, StepAttention(
        attention, metadata, {"layout.paged": 1, "attention.map_us": map_us}
    )
