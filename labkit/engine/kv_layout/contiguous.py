"""``contiguous``: one cache per request, grown by copying it into a larger one.

As mlx_lm's ``KVCacheManager``: memory comes in steps of 256 tokens, as the request needs it, and
every growth copies what was there.  Or it is set aside whole when the request is admitted
(``engine.kv.set_aside``), however little of it will be used.  Attention is MLX's, one call per
request, over what is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from labkit.engine.attention import sdpa
from labkit.engine.attention.launch_report import LaunchReport
from labkit.engine.attention.sdpa import SdpaAttention, SdpaLayer
from labkit.engine.budget.kv_demand import round_up_to_step
from labkit.engine.kv_layout.dense_kv import DenseKV, DenseKVCacheManager, TokenMove
from labkit.engine.kv_layout.kv_cache_manager import BlockTable, KVCache, StepAttention
from labkit.engine.kv_layout.kv_shape import KVShape

if TYPE_CHECKING:
    from labkit.engine.batch import Batch
    from labkit.engine.request import RequestState


def create(shapes: tuple[KVShape, ...], capacity: int, dtype: str, set_aside: int = 0) -> KVCache:
    """Make a layout of which all requests together may be promised ``capacity`` tokens.

    ``set_aside``: tokens of memory that each has from its beginning.
    """
    cache = ContiguousKVCacheManager(shapes, capacity, dtype, set_aside)
    return KVCache(cache, ContiguousMemory(cache))


class ContiguousKVCacheManager(DenseKVCacheManager):
    """Who holds which cache; a request is promised what it may need, in whole steps."""

    def __init__(
        self, shapes: tuple[KVShape, ...], capacity: int, dtype: str, set_aside: int
    ) -> None:
        super().__init__(shapes, capacity, "a KV cache", dtype)
        self._shapes = shapes
        self._least = set_aside
        self._set_aside = 0
        self._dtype = dtype
        self._promised: dict[str, int] = {}
        self.rows: dict[int, DenseKV] = {}

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Promise memory for ``num_tokens`` tokens; see ``KVCacheManager.reserve``."""
        request_id = state.request_id
        if request_id in self._tables:
            raise ValueError(f"request {request_id} holds a cache already")
        promise = self._rounded(num_tokens)
        if sum(self._promised.values()) + promise > (1 - spare) * self._capacity:
            return None
        self._promised[request_id] = promise
        row = DenseKV(self._shapes, self.accounts, self._dtype)
        if self._least:
            row.move(1, self._rounded(0), [])
            self._set_aside += row.capacity
        self.rows[self._number(request_id)] = row
        return 0

    def _rounded(self, num_tokens: int) -> int:
        return round_up_to_step(max(num_tokens, self._least))

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Tell whether as much was promised: no promise is made larger."""
        return num_tokens <= self._promised[request_id]

    def slots(self, table: BlockTable) -> int:
        """Return how large its cache is."""
        return self.rows[int(table.block_ids[0])].capacity

    def _free(self, request_id: str, table: BlockTable) -> None:
        del self._promised[request_id]
        self.rows.pop(int(table.block_ids[0])).drop()

    def counters(self) -> dict[str, float]:
        """Return also the tokens of memory that were set aside."""
        return {**super().counters(), "kv.set_aside": self._set_aside}

    def reset_counters(self) -> None:
        """Start counting anew."""
        super().reset_counters()
        self._set_aside = 0

    def check(self, running: set[str]) -> None:
        """Check the record of bytes held too; see ``KVCacheManager.check``."""
        super().check(running)
        if self.held_bytes != sum(row.nbytes for row in self.rows.values()):
            raise AssertionError("the record of bytes held disagrees with the caches")


class ContiguousMemory:
    """The caches; see ``KVMemory``."""

    def __init__(self, cache: ContiguousKVCacheManager) -> None:
        self.attention = SdpaAttention()
        self._cache = cache

    def plan(self, batch: Batch) -> tuple[Batch, StepAttention]:
        """Grow the caches that the step's tokens would overflow; the batch stays as it is."""
        spans = []
        starts = batch.cu_seqlens_q.tolist()
        for s, context in enumerate(batch.seq_lens.tolist()):
            row = self._cache.rows[int(batch.block_tables[s, 0])]
            start, stop = starts[s], starts[s + 1]
            done = context - (stop - start)
            if context > row.capacity:
                row.move(
                    1, round_up_to_step(context), [TokenMove(0, 0, 0, 0, done)] if done else []
                )
            spans.append((row, start, stop, context))
        return batch, StepAttention(self.attention, ContiguousStep(spans), {"layout.contiguous": 1})


class ContiguousStep:
    """One step over the caches of its requests; see ``SdpaStep``."""

    def __init__(self, spans: list[tuple[DenseKV, int, int, int]]) -> None:
        self.launches: list[LaunchReport] = []
        self._spans = spans

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Store the new keys and values behind the old ones."""
        for row, start, stop, context in self._spans:
            where = (0, slice(None), slice(context - (stop - start), context))
            for array, new in zip(row.layer(layer), (k, v), strict=True):
                sdpa.store(array, where, new[start:stop].transpose(1, 0, 2))

    def pending(self) -> list[mx.array]:
        """Return the arrays that were written."""
        return [array for row, *_ in self._spans for array in row.arrays()]

    def attend(self, layer: SdpaLayer, q: Any) -> tuple[mx.array, LaunchReport]:
        """Attend request by request."""
        results, read, size, window = [], 0, 2 * q.nbytes, layer.window
        for row, start, stop, context in self._spans:
            first = 0 if window is None else max(0, context - (stop - start) - window + 1)
            k, v = (array[:, :, first:context] for array in row.layer(layer.index))
            one = mx.fast.scaled_dot_product_attention(
                sdpa.heads_first(q[None, start:stop]),
                k,
                v,
                scale=layer.scale,
                mask=sdpa.causal_mask(stop - start, context - first, window),
                sinks=layer.sinks,
            )
            results.append(one[0].transpose(1, 0, 2))
            read += context - first
            size += k.nbytes + v.nbytes
        return mx.concatenate(results), sdpa.layer_report(layer.index, len(results), read, 0, size)
