"""``engine.kv.layout=contiguous``: one array per request, which grows by copying.

An array grows by ``engine.kv.growth_step`` tokens when its request needs more memory, and every
growth copies its contents. The default of 256 tokens is that of mlx_lm's ``KVCache``. On admission
a request gets memory for at least ``engine.kv.set_aside`` tokens, even if it needs less. MLX's
attention is called once per request, over the computed tokens.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from labkit.cpu.precision.kv_dtypes import KV_GROUP, QUANTIZED_BITS
from labkit.engine.attention.backends import unpaged_sdpa
from labkit.engine.attention.backends.unpaged_sdpa import SdpaAttention, SdpaLayer
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.attention.launch_evidence import LaunchReport
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_cache_interface import BlockTable, KVCache, StepAttention
from labkit.engine.kv_layout.unpaged_layout_base import DenseKV, DenseKVCacheManager, TokenMove
from labkit.engine.memory_budget.required_kv_slots import round_up_to_step
from labkit.engine.model.isolated_model_modules import import_plain

if TYPE_CHECKING:
    from labkit.config import KV
    from labkit.engine.batch import Batch
    from labkit.engine.request import RequestState


def create(shapes: tuple[KVShape, ...], capacity: int, dtype: str, options: KV) -> KVCache:
    """Create a cache of ``capacity`` tokens. ``EngineError``: ``dtype`` does not fit the shapes."""
    try:
        manager = ContiguousKVCacheManager(shapes, capacity, dtype, options)
    except ValueError as error:  # the heads do not consist of whole groups
        raise EngineError(f"engine.kv.layout=contiguous: {error}") from error
    return KVCache(manager, manager.attention, manager.prepare_step)


class ContiguousKVCacheManager(DenseKVCacheManager):
    """Promises memory to requests in multiples of the growth step, one array per request."""

    def __init__(self, shapes: tuple[KVShape, ...], capacity: int, dtype: str, options: KV) -> None:
        super().__init__(shapes, capacity, "a KV cache", dtype)
        self.attention = SdpaAttention(quantised=dtype in QUANTIZED_BITS)
        self._shapes = shapes
        self._set_aside = options.set_aside or 0
        self.growth_step = options.growth_step
        self._total_set_aside = 0
        self.dtype = dtype
        self._promised: dict[str, int] = {}
        self.rows: dict[int, DenseKV] = {}

    def reserve(self, state: RequestState, num_tokens: int, spare: float = 0.0) -> int | None:
        request_id = state.request_id
        if request_id in self._tables:
            raise ValueError(f"request {request_id} has a cache already")
        promise = self._memory_tokens(num_tokens)
        if sum(self._promised.values()) + promise > (1 - spare) * self._capacity:
            return None
        self._promised[request_id] = promise
        row = DenseKV(self._shapes, self.stats, self.dtype)
        if self._set_aside:
            row.reallocate(1, self._memory_tokens(0), [])
            self._total_set_aside += row.capacity
        self.rows[self._add_row_id(request_id)] = row
        return 0

    def _memory_tokens(self, num_tokens: int) -> int:
        return round_up_to_step(max(num_tokens, self._set_aside), self.growth_step)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Return whether memory for ``num_tokens`` was promised. A promise never grows."""
        return num_tokens <= self._promised[request_id]

    def num_slots(self, table: BlockTable) -> int:
        return self.rows[int(table.block_ids[0])].capacity

    def _free(self, request_id: str, table: BlockTable) -> None:
        del self._promised[request_id]
        self.rows.pop(int(table.block_ids[0])).free()

    def counters(self) -> dict[str, float]:
        """Return the counters, with ``kv.set_aside``: the tokens whose memory was set aside."""
        return {**super().counters(), "kv.set_aside": self._total_set_aside}

    def reset_counters(self) -> None:
        super().reset_counters()
        self._total_set_aside = 0

    def check(self, running: set[str]) -> None:
        super().check(running)
        if self.reserved_bytes != sum(row.nbytes for row in self.rows.values()):
            raise AssertionError("the count of allocated bytes disagrees with the arrays")

    def prepare_step(self, batch: Batch) -> tuple[Batch, StepAttention]:
        """Grow the arrays that are too small for the step. The batch is returned unchanged."""
        segments = []
        starts = batch.cu_seqlens_q.tolist()
        for s, context in enumerate(batch.seq_lens.tolist()):
            row = self.rows[int(batch.block_tables[s, 0])]
            start, stop = starts[s], starts[s + 1]
            num_cached = context - (stop - start)
            if context > row.capacity:
                moves = [TokenMove(0, 0, 0, 0, num_cached)] if num_cached else []
                row.reallocate(1, round_up_to_step(context, self.growth_step), moves)
            segments.append(Segment(row, start, stop, context))
        step = ContiguousStep(segments, self.dtype)
        return batch, StepAttention(self.attention, step, {"layout.contiguous": 1})


class Segment(NamedTuple):
    """A request's queries ``[start, stop)`` in a step, the last of its ``context`` tokens."""

    row: DenseKV
    start: int
    stop: int
    context: int


class ContiguousStep:
    """The attention of one step, request by request; see ``SdpaStep``."""

    def __init__(self, segments: list[Segment], dtype: str) -> None:
        self.launches: list[LaunchReport] = []
        self._segments = segments
        self._dtype = dtype

    def write(self, layer: int, k: Any, v: Any) -> None:
        for row, start, stop, context in self._segments:
            where = (0, slice(None), slice(context - (stop - start), context))
            for array, new in zip(row.layer(layer), (k, v), strict=False):  # latent: no values
                array.store(where, new[start:stop].transpose(1, 0, 2))

    def pending(self) -> list[mx.array]:
        return [array for segment in self._segments for array in segment.row.arrays()]

    def attend(self, layer: SdpaLayer, q: Any) -> tuple[mx.array, LaunchReport]:
        outputs, num_keys, nbytes, window = [], 0, 2 * q.nbytes, layer.window
        for row, start, stop, context in self._segments:
            first = 0 if window is None else max(0, context - (stop - start) - window + 1)
            queries = unpaged_sdpa.heads_first(q[None, start:stop])
            mask = unpaged_sdpa.causal_mask(stop - start, context - first, window)
            output, kv_bytes = _attend_row(row, layer, queries, first, context, mask)
            outputs.append(output[0].transpose(1, 0, 2))
            num_keys += context - first
            nbytes += kv_bytes
        report = unpaged_sdpa.layer_report(
            layer.index, len(outputs), num_keys, 0, nbytes, self._dtype
        )
        return mx.concatenate(outputs), report


def _attend_row(
    row: DenseKV, layer: SdpaLayer, queries: mx.array, first: int, end: int, mask: Any
) -> tuple[mx.array, int]:
    """Attend to a row's tokens [first, end). Return [1, heads, tokens, value_dim], bytes read."""
    arrays = row.layer(layer.index)
    if arrays[0].bits is not None:
        k, v = (array.columns(first, end) for array in arrays)
        output: mx.array = import_plain("base").quantized_scaled_dot_product_attention(
            queries.astype(mx.float32),
            k.parts,
            v.parts,
            scale=layer.scale,
            mask=mask,
            group_size=KV_GROUP,
            bits=k.bits,
        )
        return output, k.nbytes + v.nbytes
    visible = (slice(None), slice(None), slice(first, end))
    keys, values, kv_bytes = row.keys_and_values(layer.index, itemgetter(visible))
    return unpaged_sdpa.attend(queries, keys, values, layer, mask), kv_bytes
