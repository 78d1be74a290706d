"""The base class of the layouts without blocks (padded, contiguous), and their dense KV arrays.

A dense array has rows of equal capacity. Each layer has an array of keys and an array of values,
[rows, num_kv_heads, capacity, head_dim]. A latent layer has keys alone.

The arrays are MLX's, so that its attention reads them in place. They are written through NumPy
views, which is safe between two steps: every step is evaluated, so no graph still reads them.

As in mlx_lm's ``QuantizedKVCache``, quantised arrays have groups of ``KV_GROUP`` elements along the
head dimension. Scales and biases are float32, so that they take as many bytes as in the paged
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.cpu.precision.kv_dtypes import KV_GROUP, QUANTIZED_BITS
from labkit.engine.attention.backends import unpaged_sdpa
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.kv_cache_interface import BlockTable, KVCacheManager
from labkit.engine.memory_budget.required_kv_slots import CACHE_STEP_TOKENS, round_up_to_step


@dataclass(frozen=True, slots=True)
class KVArray:
    """The keys, or the values, of a layer.

    ``parts`` is one array or, if they are quantised to ``bits`` bits, three in the order of
    ``mlx.core.quantize``: words (uint32, packed elements), scales and biases (float32), each
    [rows, num_kv_heads, capacity, ...].
    """

    parts: tuple[mx.array, ...]
    bits: int | None = None

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: str) -> KVArray:
        if dtype not in QUANTIZED_BITS:
            return cls((mx.zeros(shape, getattr(mx, dtype)),))
        bits, (*lead, head_dim) = QUANTIZED_BITS[dtype], shape
        words = mx.zeros((*lead, head_dim * bits // 32), mx.uint32)
        # With scales of 0, tokens that are not written have the value 0.
        scales, biases = (mx.zeros((*lead, head_dim // KV_GROUP), mx.float32) for _ in range(2))
        return cls((words, scales, biases), bits)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def columns(self, first: int, end: int) -> KVArray:
        """Return the tokens from ``first`` to ``end`` (exclusive)."""
        return KVArray(tuple(part[:, :, first:end] for part in self.parts), self.bits)

    def store(self, index: Any, values: Any) -> None:
        """Write ``values``, an MLX or NumPy array, in place, quantised like the array."""
        if self.bits is None:
            unpaged_sdpa.store(self.parts[0], index, values)
            return
        lazy = isinstance(values, mx.array)
        numbers = (values if lazy else mx.array(values)).astype(mx.float32)
        quantized = mx.quantize(numbers, group_size=KV_GROUP, bits=self.bits)
        for part, new in zip(self.parts, quantized, strict=True):
            unpaged_sdpa.store(part, index, new if lazy else np.asarray(new))


@dataclass(slots=True)
class AllocationStats:
    """Bytes of KV memory allocated now, at the peak, and copied in ``moves`` reallocations."""

    allocated: int = 0
    peak: int = 0
    copied: int = 0
    moves: int = 0

    def allocate(self, nbytes: int) -> None:
        """Add ``nbytes`` to the allocated bytes. A negative number means freed bytes."""
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)


@dataclass(frozen=True, slots=True)
class TokenMove:
    """A copy of ``length`` tokens from a row of the old array to a row of the new array."""

    old_row: int
    old_start: int
    new_row: int
    new_start: int
    length: int


class DenseKV:
    """Keys and values of ``rows`` x ``capacity`` tokens in every layer.

    Unwritten tokens are zeros, because a NaN would spoil the softmax even at a masked position.
    ``dtype`` is float32, float16, bfloat16, int8 or int4.
    """

    def __init__(self, shapes: tuple[KVShape, ...], stats: AllocationStats, dtype: str) -> None:
        self.shapes = shapes
        self.rows = self.capacity = 0
        self._dtype = dtype
        self._layer_bytes = [shape.token_bytes(dtype) for shape in shapes]
        self.token_bytes = sum(self._layer_bytes)
        self._stats = stats
        self._layers: list[tuple[KVArray, ...]] = []

    @property
    def nbytes(self) -> int:
        return self.rows * self.capacity * self.token_bytes

    def layer(self, index: int) -> tuple[KVArray, ...]:
        """Return a layer's keys and, unless they are a part of the keys, its values."""
        return self._layers[index]

    def keys_and_values(
        self, index: int, select: Callable[[mx.array], mx.array]
    ) -> tuple[mx.array, mx.array, int]:
        """Return the selected keys and values of a layer, and their bytes.

        ``select`` takes and returns an array [rows, num_kv_heads, tokens, head_dim], not quantised.
        """
        arrays = [select(array.parts[0]) for array in self.layer(index)]
        values = arrays[-1][..., : self.shapes[index].value_dim]
        return arrays[0], values, sum(array.nbytes for array in arrays)

    def arrays(self) -> list[mx.array]:
        return [part for layer in self._layers for array in layer for part in array.parts]

    def reallocate(self, rows: int, capacity: int, moves: Iterable[TokenMove]) -> None:
        """Allocate new arrays, copy ``moves`` into them and free the old arrays, layer by layer."""
        moves = tuple(moves)
        old_tokens, old_layers = self.rows * self.capacity, self._layers
        self._layers = []
        for shape, token_bytes in zip(self.shapes, self._layer_bytes, strict=True):
            size = rows, shape.num_kv_heads, capacity
            layer = tuple(KVArray.zeros((*size, dim), self._dtype) for dim in shape.stored_dims)
            mx.eval([part for array in layer for part in array.parts])
            self._stats.allocate(rows * capacity * token_bytes)
            if old_layers:
                _copy(old_layers.pop(0), layer, moves)
                self._stats.allocate(-old_tokens * token_bytes)
            self._layers.append(layer)
        self.rows, self.capacity = rows, capacity
        self._stats.copied += sum(move.length for move in moves) * self.token_bytes
        self._stats.moves += bool(moves)

    def free(self) -> None:
        self._stats.allocate(-self.nbytes)
        self._layers, self.rows, self.capacity = [], 0, 0


def _copy(old: tuple[KVArray, ...], new: tuple[KVArray, ...], moves: tuple[TokenMove, ...]) -> None:
    sources, targets = (
        [_numpy_view(part) for array in layer for part in array.parts] for layer in (old, new)
    )
    for source, target in zip(sources, targets, strict=True):
        for move in moves:
            target[move.new_row, :, move.new_start : move.new_start + move.length] = source[
                move.old_row, :, move.old_start : move.old_start + move.length
            ]


def _numpy_view(array: mx.array) -> NDArray[Any]:
    """Return a writable NumPy view. bfloat16, which NumPy lacks, is viewed as uint16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


class DenseKVCacheManager(KVCacheManager):
    """Base class for layouts in which each request has one row, identified by a row id.

    ``capacity`` is the number of tokens that may be promised to all requests together. ``row_name``
    is the term for a request's memory in messages. Memory grows by ``growth_step`` tokens.
    """

    growth_step = CACHE_STEP_TOKENS

    def __init__(
        self, shapes: tuple[KVShape, ...], capacity: int, row_name: str, dtype: str
    ) -> None:
        super().__init__(sum(shape.token_bytes(dtype) for shape in shapes))
        self.stats = AllocationStats()
        self._capacity = capacity
        self._row_name = row_name
        self._next_row_id = 0

    @property
    def reserved_bytes(self) -> int:
        return self.stats.allocated

    @property
    def total_bytes(self) -> int:
        return self._capacity * self.token_bytes

    @property
    def capacity_tokens(self) -> int:
        return self._capacity // self.growth_step * self.growth_step

    def refusal_reason(self, num_tokens: int) -> str | None:
        needed = self._memory_tokens(num_tokens)
        if needed <= self._capacity:
            return None
        return (
            f"need {self._row_name} of {needed} tokens, but there is room for only {self._capacity}"
        )

    def _memory_tokens(self, num_tokens: int) -> int:
        return round_up_to_step(num_tokens, self.growth_step)

    def _add_row_id(self, request_id: str) -> int:
        """Return a new row id, and store it as the request's block table."""
        row_id, self._next_row_id = self._next_row_id, self._next_row_id + 1
        self._tables[request_id] = BlockTable(np.array([row_id], np.int32))
        return row_id

    def counters(self) -> dict[str, float]:
        return {
            "peak_kv_bytes": self.stats.peak,
            "kv.bytes_copied": self.stats.copied,
            "kv.moves": self.stats.moves,
            **super().counters(),
        }

    def reset_counters(self) -> None:
        super().reset_counters()
        self.stats.peak, self.stats.copied, self.stats.moves = self.stats.allocated, 0, 0
