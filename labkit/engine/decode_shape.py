"""How many rows a step of decodes alone has, so that graphs of a shape can be used again.

A padding row is a sequence of its own, for nobody: token 0 at position 0, its one slot in the
null block, which no request reads. Its logits are computed, as in a graph of fixed shape, and
not looked at.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from labkit.config import DecodeShape as Name
from labkit.engine.input_builder import Batch
from labkit.engine.stats import Counters


class DecodeShape(Protocol):
    """Decides the shape.

    ``bounded``: whether there are so few shapes that each may keep a compiled graph.
    """

    name: str
    bounded: bool

    def rows(self, needed: int) -> int:
        """Return how many rows a step is given that needs ``needed``; at least as many."""


class Exact:
    """As many rows as tokens."""

    name = "exact"
    bounded = False

    def rows(self, needed: int) -> int:
        return needed


class Bucketed:
    """The next power of two, at most ``capacity``, the rows there can be."""

    name = "bucketed"
    bounded = True

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def rows(self, needed: int) -> int:
        bucket = 1 << (needed - 1).bit_length()
        return max(needed, min(bucket, self._capacity))


class Fixed:
    """Always ``capacity``, the rows there can be.

    Tested and rejected in llama.cpp's serving loop (seed 003): rows for nobody cost in
    proportion to how many they are.
    """

    name = "fixed"
    bounded = True

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    def rows(self, needed: int) -> int:
        return max(needed, self._capacity)


def create(name: Name, capacity: int) -> DecodeShape:
    """Return the shape of ``engine.decode_shape``; ``capacity`` is the rows there can be."""
    if name is Name.exact:
        return Exact()
    return Bucketed(capacity) if name is Name.bucketed else Fixed(capacity)


class Padding:
    """Pads steps of decodes alone, and counts how often a shape comes again.

    ``shape.new``: steps of a shape not seen before; ``shape.reused``: of one seen before, as
    a cache of graphs sees it; ``shape.repeated``: of the shape of the step before, as an
    engine that keeps one graph sees it.
    """

    def __init__(self, shape: DecodeShape, counters: Counters) -> None:
        self._shape = shape
        self._counters = counters
        self._seen: set[tuple[int, int]] = set()
        self._last: tuple[int, int] | None = None

    def pad(self, batch: Batch) -> Batch:
        """Return the batch with as many rows as its shape has."""
        if not batch.prefill_tokens:
            batch = with_padding(batch, self._shape.rows(batch.total_q) - batch.total_q)
            self._counters.add(f"decode_shape.{self._shape.name}")
        key = (batch.total_q, len(batch.logit_rows))
        self._counters.add("shape.reused" if key in self._seen else "shape.new")
        self._counters.add("shape.repeated", key == self._last)
        self._counters.add("tokens.padded", batch.padding)
        self._seen.add(key)
        self._last = key
        return batch


def with_padding(batch: Batch, count: int) -> Batch:
    """Return the batch with ``count`` rows more that stand for no request."""
    if count == 0:
        return batch
    nothing, more = np.zeros(count, np.int32), np.arange(1, count + 1, dtype=np.int32)
    tables = np.zeros((count, batch.block_tables.shape[1]), np.int32)
    return replace(
        batch,
        tokens=np.concatenate([batch.tokens, nothing]),
        positions=np.concatenate([batch.positions, nothing]),
        cu_seqlens_q=np.concatenate([batch.cu_seqlens_q, batch.cu_seqlens_q[-1] + more]),
        seq_lens=np.concatenate([batch.seq_lens, nothing + np.int32(1)]),
        block_tables=np.concatenate([batch.block_tables, tables]),
        logit_rows=np.concatenate([batch.logit_rows, np.int32(batch.total_q - 1) + more]),
        padding=count,
    )
