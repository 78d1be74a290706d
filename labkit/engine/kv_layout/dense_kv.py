"""What layouts without blocks share: rectangles of keys and values, and who has which.

A rectangle is one array of keys and one of values per layer, [rows, kv_heads, capacity, head_dim].

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

from labkit.engine.budget.kv_demand import round_up_to_step
from labkit.engine.kv_layout.kv_cache_manager import BlockTable, KVCacheManager
from labkit.engine.kv_layout.kv_shape import KVShape


@dataclass(slots=True)
class AllocationStats:
    """Bytes of KV memory: allocated now and at most, and copied from one place to another."""

    held: int = 0
    peak: int = 0
    copied: int = 0
    moves: int = 0

    def allocate(self, size: int) -> None:
        """Count memory that was allocated; negative: let go."""
        self.held += size
        self.peak = max(self.peak, self.held)


@dataclass(frozen=True, slots=True)
class TokenMove:
    """Tokens that move: a piece of an old row to a place in a new row."""

    old_row: int
    old_start: int
    new_row: int
    new_start: int
    length: int


class DenseKV:
    """Memory for ``rows`` x ``capacity`` tokens in every layer; zeros where nothing is written.

    Finite everywhere, because a masked NaN would still spoil a sum. ``dtype``: float32,
    float16 or bfloat16.
    """

    def __init__(self, shapes: tuple[KVShape, ...], accounts: AllocationStats, dtype: str) -> None:
        self.shapes = shapes
        self.rows = self.capacity = 0
        self._dtype = dtype
        self._layer_bytes = [shape.token_bytes(dtype) for shape in shapes]
        self.token_bytes = sum(self._layer_bytes)
        self._accounts = accounts
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

    def move(self, rows: int, capacity: int, spans: Iterable[TokenMove]) -> None:
        """Take new memory and copy ``spans`` into it, layer by layer; let go of the old."""
        spans = tuple(spans)
        old_tokens, old = self.rows * self.capacity, self._pairs
        self._pairs = []
        for shape, token_bytes in zip(self.shapes, self._layer_bytes, strict=True):
            pair = _zeros(shape, rows, capacity, self._dtype)
            self._accounts.allocate(rows * capacity * token_bytes)
            if old:
                _copy(old.pop(0), pair, spans)
                self._accounts.allocate(-old_tokens * token_bytes)
            self._pairs.append(pair)
        self.rows, self.capacity = rows, capacity
        self._accounts.copied += sum(span.length for span in spans) * self.token_bytes
        self._accounts.moves += bool(spans)

    def drop(self) -> None:
        """Let go of the memory."""
        self._accounts.allocate(-self.nbytes)
        self._pairs, self.rows, self.capacity = [], 0, 0


def _zeros(shape: KVShape, rows: int, capacity: int, dtype: str) -> tuple[mx.array, mx.array]:
    size, kind = (rows, shape.num_kv_heads, capacity), getattr(mx, dtype)
    pair = mx.zeros((*size, shape.key_dim), kind), mx.zeros((*size, shape.value_dim), kind)
    mx.eval(pair)
    return pair


def _copy(
    old: tuple[mx.array, mx.array], new: tuple[mx.array, mx.array], spans: tuple[TokenMove, ...]
) -> None:
    for source, target in zip(map(_words, old), map(_words, new), strict=True):
        for s in spans:
            target[s.new_row, :, s.new_start : s.new_start + s.length] = source[
                s.old_row, :, s.old_start : s.old_start + s.length
            ]


def _words(array: mx.array) -> NDArray[Any]:
    """Return a writable view; NumPy has no bfloat16, so that is seen as its 16 bits."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


class DenseKVCacheManager(KVCacheManager):
    """The cache of a layout whose requests have a piece of memory each, numbered.

    ``capacity``: tokens of memory that may be promised to all requests together; ``piece``:
    what a request has, in words.
    """

    def __init__(self, shapes: tuple[KVShape, ...], capacity: int, piece: str, dtype: str) -> None:
        super().__init__(sum(shape.token_bytes(dtype) for shape in shapes))
        self.accounts = AllocationStats()
        self._capacity = capacity
        self._piece = piece
        self._next = 0

    @property
    def held_bytes(self) -> int:
        """Bytes allocated now."""
        return self.accounts.held

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request can hold at most, alone."""
        return self._capacity // round_up_to_step(1) * round_up_to_step(1)

    def refusal_reason(self, num_tokens: int) -> str | None:
        """Say why ``num_tokens`` tokens would not fit even alone; None: they would."""
        needed = self._rounded(num_tokens)
        if needed <= self._capacity:
            return None
        return f"need {self._piece} of {needed} tokens, there is room for {self._capacity}"

    def _rounded(self, num_tokens: int) -> int:
        """Return the tokens of memory that so many take."""
        return round_up_to_step(num_tokens)

    def _number(self, request_id: str) -> int:
        """Name a new request's piece by a number, which is its table and never changes."""
        number, self._next = self._next, self._next + 1
        self._tables[request_id] = BlockTable(np.array([number], np.int32))
        return number

    def counters(self) -> dict[str, float]:
        """Return bytes held, used and copied since the last reset."""
        return {
            "peak_kv_bytes": self.accounts.peak,
            "kv.bytes_copied": self.accounts.copied,
            "kv.moves": self.accounts.moves,
            **super().counters(),
        }

    def reset_counters(self) -> None:
        """Start counting anew; peaks restart from what is held."""
        super().reset_counters()
        held = self.accounts.held
        self.accounts.peak, self.accounts.copied, self.accounts.moves = held, 0, 0
