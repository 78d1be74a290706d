"""``contiguous``: one cache per request, grown by copying it into a larger one.

As mlx_lm's ``KVCache``: memory comes in steps of 256 tokens, as the request needs it, and
every growth copies what was there.  Attention is MLX's, one call per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from labkit.engine.attention import sdpa
from labkit.engine.attention.report import LaunchReport
from labkit.engine.attention.sdpa import SdpaAttention, SdpaLayer
from labkit.engine.budget.capacity import rounded
from labkit.engine.kv_layout.accounting import Pieces
from labkit.engine.kv_layout.kv_cache import KVLayout, LayerShape, Step
from labkit.engine.kv_layout.rectangle import Rectangle, Span

if TYPE_CHECKING:
    from labkit.engine.input_builder import Batch
    from labkit.engine.request import RequestState


class Contiguous:
    """Makes contiguous layouts of ``dtype``; see ``LayoutKind``."""

    def __init__(self, block_size: int, dtype: str = "float32") -> None:
        self._block_size = block_size
        self._dtype = dtype

    def create(self, shapes: tuple[LayerShape, ...], num_blocks: int) -> KVLayout:
        """Make a layout that may hold the bytes of so many blocks."""
        return self._layout(shapes, num_blocks * self._block_size)

    def holding(self, shapes: tuple[LayerShape, ...], requests: int, tokens: int) -> KVLayout:
        """Make a layout for so many requests of so many tokens each."""
        return self._layout(shapes, requests * rounded(tokens))

    def _layout(self, shapes: tuple[LayerShape, ...], capacity: int) -> KVLayout:
        cache = ContiguousCache(shapes, capacity, self._dtype)
        return KVLayout(cache, ContiguousMemory(cache))


class ContiguousCache(Pieces):
    """Who holds which cache; a request is promised what it may need, in whole steps.

    ``capacity``: tokens that all requests together may be promised.
    """

    def __init__(self, shapes: tuple[LayerShape, ...], capacity: int, dtype: str) -> None:
        super().__init__(shapes, capacity, "a KV cache", dtype)
        self._shapes = shapes
        self._dtype = dtype
        self._promised: dict[str, int] = {}
        self._rows: dict[int, Rectangle] = {}

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        """Promise memory for ``num_tokens`` tokens; see ``KVCache.reserve``."""
        request_id = state.request_id
        if request_id in self._tables:
            raise ValueError(f"request {request_id} holds a cache already")
        if sum(self._promised.values()) + rounded(num_tokens) > (1 - spare) * self._capacity:
            return None
        self._promised[request_id] = rounded(num_tokens)
        self._rows[self._number(request_id)] = Rectangle(self._shapes, self.ledger, self._dtype)
        return 0

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Tell whether as much was promised: no promise is made larger."""
        return num_tokens <= self._promised[request_id]

    def row(self, number: int) -> Rectangle:
        """Return a cache by its number."""
        return self._rows[number]

    def release(self, request_id: str) -> None:
        """Let go of a request's cache; one that has none is ignored."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            del self._promised[request_id]
            self._rows.pop(int(table.block_ids[0])).drop()
            self._used.forget(request_id)

    def staying(self) -> tuple[str, ...]:
        """Nothing is computed for requests that ended."""
        return ()

    def check(self, running: set[str]) -> None:
        """Raise ``AssertionError`` unless exactly the ``running`` requests hold memory."""
        if set(self._tables) != running:
            raise AssertionError(f"caches are held by {set(self._tables)}, running are {running}")
        if self.ledger.held != sum(row.nbytes for row in self._rows.values()):
            raise AssertionError("the record of bytes held disagrees with the caches")


class ContiguousMemory:
    """The caches; see ``KVMemory``."""

    def __init__(self, cache: ContiguousCache) -> None:
        self.attention = SdpaAttention()
        self._cache = cache

    def plan(self, batch: Batch) -> tuple[Batch, Step]:
        """Grow the caches that the step's tokens would overflow; the batch stays as it is."""
        spans = []
        starts = batch.cu_seqlens_q.tolist()
        for s, context in enumerate(batch.seq_lens.tolist()):
            row = self._cache.row(int(batch.block_tables[s, 0]))
            start, stop = starts[s], starts[s + 1]
            done = context - (stop - start)
            if context > row.capacity:
                row.move(1, rounded(context), [Span(0, 0, 0, 0, done)] if done else [])
            spans.append((row, start, stop, context))
        return batch, Step(self.attention, ContiguousStep(spans), {"layout.contiguous": 1})


class ContiguousStep:
    """One step over the caches of its requests; see ``SdpaStep``."""

    def __init__(self, spans: list[tuple[Rectangle, int, int, int]]) -> None:
        self.launches: list[LaunchReport] = []
        self._spans = spans

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Store the new keys and values behind the old ones."""
        for row, start, stop, context in self._spans:
            where = (0, slice(None), slice(context - (stop - start), context))
            for array, new in zip(row.layer(layer), (k, v), strict=True):
                sdpa.put(array, where, new[start:stop].transpose(1, 0, 2))

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
                mask=sdpa.mask_of_one(stop - start, context - first, window),
                sinks=layer.sinks,
            )
            results.append(one[0].transpose(1, 0, 2))
            read += context - first
            size += k.nbytes + v.nbytes
        return mx.concatenate(results), sdpa.report(layer.index, len(results), read, 0, size)
