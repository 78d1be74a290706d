"""Build a step's ``Batch`` from its scheduled chunks, and pad it to a shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from labkit.config import DecodeShape
from labkit.engine.batch import PLACEHOLDER_TOKEN_ID, Batch, Ints, freeze, pack, with_padding
from labkit.engine.engine_protocol import Counters
from labkit.engine.kv_layout.kv_cache_manager import BlockTable, KVCacheManager
from labkit.engine.request import RequestState
from labkit.engine.scheduler_output import ScheduledChunk, SchedulerOutput

# How a chunk and so many drafts become segments of the packed batch: (start, length) of each.
SegmentLayout = Callable[[ScheduledChunk, int], list[tuple[int, int]]]


def window(chunk: ScheduledChunk, drafts: int) -> list[tuple[int, int]]:
    """Make one segment of a chunk and its drafts, causal within."""
    return [(chunk.start, chunk.num_tokens + drafts)]


def staircase(chunk: ScheduledChunk, drafts: int) -> list[tuple[int, int]]:
    """Make each drafted row a segment of one token, its context one token longer each time.

    The rows share a block table and every key is written before any is read, so a row sees
    the drafts before it.
    """
    stop = chunk.start + chunk.num_tokens
    return [(chunk.start, chunk.num_tokens), *((stop + i, 1) for i in range(drafts))]


def stack(tables: Sequence[BlockTable]) -> Ints:
    """Return int32 [tables, longest], padded with 0, the null block; nobody can write to it."""
    stacked = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table.block_ids
    return freeze(stacked)


class InputBuilder:
    """Turns scheduled chunks into a ``Batch``.

    Block tables are stacked again only when one of the step's tables is another object, and what
    depends on nothing but how many requests decode is made once.
    """

    def __init__(self, cache: KVCacheManager, cut: SegmentLayout = window) -> None:
        self._cache = cache
        self._cut = cut
        self._stacked_for: list[BlockTable] = []
        self._stacked: Ints = np.zeros((0, 0), np.int32)
        self._counted: Ints = freeze(np.zeros(1, np.int32))  # 0, 1, ... as many as decode
        self._rows: Ints = freeze(np.zeros(0, np.int32))  # all but the last of these

    def build(self, output: SchedulerOutput) -> Batch:
        """Pack the chunks of a step in their order."""
        if output.is_decode_only:
            return self._decodes(output.chunks)
        tokens: list[int] = []
        rows: list[int] = []
        sampling: list[RequestState] = []
        placeholders: list[tuple[int, str]] = []
        segments: list[tuple[int, int]] = []
        tables: list[BlockTable] = []
        for chunk in output.chunks:
            state, stop = chunk.state, chunk.start + chunk.num_tokens
            drafts = output.drafts.get(state.request_id, ())
            tokens += state.token_ids[chunk.start : stop]
            if stop > state.num_tokens:
                placeholders.append((len(tokens), state.request_id))
                tokens.append(PLACEHOLDER_TOKEN_ID)
            if chunk.samples:
                rows += range(len(tokens) - 1, len(tokens) + len(drafts))
                sampling.append(state)
                sampling += [state.with_output(drafts[: i + 1]) for i in range(len(drafts))]
            tokens += drafts
            own = self._cut(chunk, len(drafts))
            segments += own
            tables += [self._cache.table(state.request_id)] * len(own)
        return pack(
            tokens,
            segments,
            self._block_tables(tables),
            rows,
            sampling,
            prefill_tokens=sum(chunk.num_tokens for chunk in output.chunks if chunk.is_prefill),
            placeholders=tuple(placeholders),
        )

    def _decodes(self, chunks: Sequence[ScheduledChunk]) -> Batch:
        """Pack a step of decodes without drafts: a token of each request."""
        tokens, positions, seq_lens, tables, sampling, placeholders = [], [], [], [], [], []
        for chunk in chunks:
            state, start = chunk.state, chunk.start
            if start < len(state.token_ids):
                tokens.append(state.token_ids[start])
            else:
                placeholders.append((len(tokens), state.request_id))
                tokens.append(PLACEHOLDER_TOKEN_ID)
            positions.append(start)
            seq_lens.append(start + 1)
            tables.append(self._cache.table(state.request_id))
            sampling.append(state)
        count = len(tokens)
        if count != len(self._rows):
            self._counted = freeze(np.arange(count + 1, dtype=np.int32))
            self._rows = freeze(np.arange(count, dtype=np.int32))
        return Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            cu_seqlens_q=self._counted,
            seq_lens=np.array(seq_lens, np.int32),
            block_tables=self._block_tables(tables),
            logit_rows=self._rows,
            sampling=tuple(sampling),
            prefill_tokens=0,
            placeholders=tuple(placeholders),
        )

    def _block_tables(self, tables: list[BlockTable]) -> Ints:
        if tables != self._stacked_for:
            self._stacked_for, self._stacked = tables, stack(tables)
        return self._stacked


# How many rows a step of decodes alone is given that needs ``needed``, of the ``capacity`` there
# can be. A padding row is a sequence of its own, for nobody: token 0 at position 0, its one slot in
# the null block, which no request reads. Its logits are computed, as in a graph of fixed shape, and
# not looked at.


def exact(needed: int, capacity: int) -> int:
    """As many rows as tokens."""
    return needed


def bucketed(needed: int, capacity: int) -> int:
    """The next power of two, at most ``capacity``."""
    return max(needed, min(1 << (needed - 1).bit_length(), capacity))


def fixed(needed: int, capacity: int) -> int:
    """Always ``capacity``.

    Tested and rejected in llama.cpp's serving loop (seed 003): rows for nobody cost in
    proportion to how many they are.
    """
    return max(needed, capacity)


SHAPES: dict[DecodeShape, Callable[[int, int], int]] = {
    DecodeShape.exact: exact,
    DecodeShape.bucketed: bucketed,
    DecodeShape.fixed: fixed,
}


class Padding:
    """Pads steps of decodes alone, and counts how often a shape comes again.

    ``shape.new``: steps of a shape not seen before; ``shape.reused``: of one seen before, as
    a cache of graphs sees it; ``shape.repeated``: of the shape of the step before, as an
    engine that keeps one graph sees it.
    """

    def __init__(self, shape: DecodeShape, capacity: int, counters: Counters) -> None:
        self._rows = SHAPES[shape]
        self._capacity = capacity
        self._counted = f"decode_shape.{shape.value}"
        self._counters = counters
        self._seen: set[tuple[int, int]] = set()
        self._last: tuple[int, int] | None = None

    def pad(self, batch: Batch) -> Batch:
        """Return the batch with as many rows as its shape has."""
        if not batch.prefill_tokens:
            needed = len(batch.tokens)
            rows = self._rows(needed, self._capacity)
            if rows > needed:
                batch = with_padding(batch, rows - needed)
            self._counters.add(self._counted)
        key = (len(batch.tokens), len(batch.logit_rows))
        self._counters.add_all(
            {
                "shape.reused" if key in self._seen else "shape.new": 1,
                "shape.repeated": key == self._last,
                "tokens.padded": batch.padding,
            }
        )
        self._seen.add(key)
        self._last = key
        return batch
