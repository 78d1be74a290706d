"""A rectangle of keys and values per layer, [rows, kv_heads, capacity, head_dim].

The arrays are MLX's, so that its attention reads them where they lie, and are written
through NumPy views: MLX holds no reader between two steps, for every step is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.kv_layout.accounting import Ledger
from labkit.engine.kv_layout.kv_cache import LayerShape


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that move: a piece of an old row to a place in a new row."""

    old_row: int
    old_start: int
    new_row: int
    new_start: int
    length: int


class Rectangle:
    """Memory for ``rows`` x ``capacity`` tokens in every layer; zeros where nothing is written.

    Finite everywhere, because a masked NaN would still spoil a sum. ``dtype``: float32,
    float16 or bfloat16.
    """

    def __init__(self, shapes: tuple[LayerShape, ...], ledger: Ledger, dtype: str) -> None:
        self.shapes = shapes
        self.rows = self.capacity = 0
        self._dtype = dtype
        self._layer_bytes = [shape.token_bytes(dtype) for shape in shapes]
        self.token_bytes = sum(self._layer_bytes)
        self._ledger = ledger
        self._pairs: list[tuple[mx.array, mx.array]] = []

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.rows * self.capacity * self.token_bytes

    def layer(self, index: int) -> tuple[mx.array, mx.array]:
        """Return a layer's keys and values."""
        return self._pairs[index]

    def arrays(self) -> list[mx.array]:
        """Return all layers' keys and values."""
        return [array for pair in self._pairs for array in pair]

    def move(self, rows: int, capacity: int, spans: Iterable[Span]) -> None:
        """Take new memory and copy ``spans`` into it, layer by layer; let go of the old."""
        spans = tuple(spans)
        old_tokens, old = self.rows * self.capacity, self._pairs
        self._pairs = []
        for shape, token_bytes in zip(self.shapes, self._layer_bytes, strict=True):
            pair = _zeros(shape, rows, capacity, self._dtype)
            self._ledger.allocate(rows * capacity * token_bytes)
            if old:
                _copy(old.pop(0), pair, spans)
                self._ledger.free(old_tokens * token_bytes)
            self._pairs.append(pair)
        self.rows, self.capacity = rows, capacity
        self._ledger.copied += sum(span.length for span in spans) * self.token_bytes
        self._ledger.moves += bool(spans)

    def drop(self) -> None:
        """Let go of the memory."""
        self._ledger.free(self.nbytes)
        self._pairs, self.rows, self.capacity = [], 0, 0


def _zeros(shape: LayerShape, rows: int, capacity: int, dtype: str) -> tuple[mx.array, mx.array]:
    size, kind = (rows, shape.num_kv_heads, capacity), getattr(mx, dtype)
    pair = mx.zeros((*size, shape.key_dim), kind), mx.zeros((*size, shape.value_dim), kind)
    mx.eval(pair)
    return pair


def _copy(
    old: tuple[mx.array, mx.array], new: tuple[mx.array, mx.array], spans: tuple[Span, ...]
) -> None:
    for source, target in zip(map(_words, old), map(_words, new), strict=True):
        for s in spans:
            target[s.new_row, :, s.new_start : s.new_start + s.length] = source[
                s.old_row, :, s.old_start : s.old_start + s.length
            ]


def _words(array: mx.array) -> NDArray[Any]:
    """Return a writable view; NumPy has no bfloat16, so that is seen as its 16 bits."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
