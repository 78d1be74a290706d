"""A step's chunks as packed arrays, built once on the host, and padded to a shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.config import DecodeShape
from labkit.engine.attention.attention_metadata import freeze
from labkit.engine.engine_protocol import Counters
from labkit.engine.kv_layout.kv_cache_manager import BlockTable, KVCacheManager
from labkit.engine.request import RequestState
from labkit.engine.scheduler_output import ScheduledChunk, SchedulerOutput

Ints = NDArray[np.int32]
# In the place of a token that the step in flight will sample.
UNKNOWN = -1


class Batch(NamedTuple):
    """One step's tokens, packed sequence after sequence, decodes first.

    ``tokens`` and ``positions`` are int32 [total_q]; ``cu_seqlens_q`` int32
    [num_seqs + 1]; ``seq_lens`` int32 [num_seqs], contexts with the new tokens;
    ``block_tables`` int32 [num_seqs, max_blocks], padded with 0; ``logit_rows`` int32,
    the packed rows after which a token is sampled, for the requests ``sampling``.
    ``unknown``: row and request id of every token that the step in flight will sample;
    ``padding``: how many rows at the end stand for no request.
    """

    tokens: Ints
    positions: Ints
    cu_seqlens_q: Ints
    seq_lens: Ints
    block_tables: Ints
    logit_rows: Ints
    sampling: tuple[RequestState, ...]
    prefill_tokens: int
    unknown: tuple[tuple[int, str], ...] = ()
    padding: int = 0

    @property
    def total_q(self) -> int:
        """Tokens computed, padding included."""
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens computed for requests."""
        return len(self.tokens) - self.padding

    @property
    def num_segments(self) -> int:
        """Segments of requests: one for each chunk, more where drafts have their own."""
        return len(self.seq_lens) - self.padding


# How a chunk and so many drafts become segments of the packed batch: (start, length) of each.
Cut = Callable[[ScheduledChunk, int], list[tuple[int, int]]]


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


def pack(
    tokens: list[int],
    segments: list[tuple[int, int]],
    block_tables: Ints,
    rows: list[int],
    sampling: list[RequestState],
    *,
    prefill_tokens: int = 0,
    unknown: tuple[tuple[int, str], ...] = (),
) -> Batch:
    """Derive a batch from its tokens and the (start, length) of each segment."""
    starts, lengths = np.array(segments, np.int32).reshape(-1, 2).T
    cu_seqlens_q = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    # Packed index minus where the segment begins, plus where its tokens begin.
    shift = starts - cu_seqlens_q[:-1]
    return Batch(
        tokens=np.asarray(tokens, np.int32),
        positions=np.arange(len(tokens), dtype=np.int32) + np.repeat(shift, lengths),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=starts + lengths,
        block_tables=block_tables,
        logit_rows=np.asarray(rows, np.int32),
        sampling=tuple(sampling),
        prefill_tokens=prefill_tokens,
        unknown=unknown,
    )


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

    def __init__(self, cache: KVCacheManager, cut: Cut = window) -> None:
        self._cache = cache
        self._cut = cut
        self._stacked_for: list[BlockTable] = []
        self._stacked: Ints = np.zeros((0, 0), np.int32)
        self._counted: Ints = freeze(np.zeros(1, np.int32))  # 0, 1, ... as many as decode
        self._rows: Ints = freeze(np.zeros(0, np.int32))  # all but the last of these

    def build(self, output: SchedulerOutput) -> Batch:
        """Pack the chunks of a step in their order."""
        if output.decodes:
            return self._decodes(output.chunks)
        tokens: list[int] = []
        rows: list[int] = []
        sampling: list[RequestState] = []
        unknown: list[tuple[int, str]] = []
        segments: list[tuple[int, int]] = []
        tables: list[BlockTable] = []
        for chunk in output.chunks:
            state, stop = chunk.state, chunk.start + chunk.num_tokens
            drafts = output.drafts.get(state.request_id, ())
            tokens += state.token_ids[chunk.start : stop]
            if stop > state.num_tokens:
                unknown.append((len(tokens), state.request_id))
                tokens.append(UNKNOWN)
            if chunk.samples:
                rows += range(len(tokens) - 1, len(tokens) + len(drafts))
                sampling.append(state)
                sampling += [state.followed_by(drafts[: i + 1]) for i in range(len(drafts))]
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
            unknown=tuple(unknown),
        )

    def _decodes(self, chunks: Sequence[ScheduledChunk]) -> Batch:
        """Pack a step of decodes without drafts: a token of each request."""
        tokens, positions, seq_lens, tables, sampling, unknown = [], [], [], [], [], []
        for chunk in chunks:
            state, start = chunk.state, chunk.start
            if start < len(state.token_ids):
                tokens.append(state.token_ids[start])
            else:
                unknown.append((len(tokens), state.request_id))
                tokens.append(UNKNOWN)
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
            unknown=tuple(unknown),
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


def with_padding(batch: Batch, count: int) -> Batch:
    """Return the batch with ``count`` rows more that stand for no request."""
    nothing, more = np.zeros(count, np.int32), np.arange(1, count + 1, dtype=np.int32)
    tables = np.zeros((count, batch.block_tables.shape[1]), np.int32)
    return batch._replace(
        tokens=np.concatenate([batch.tokens, nothing]),
        positions=np.concatenate([batch.positions, nothing]),
        cu_seqlens_q=np.concatenate([batch.cu_seqlens_q, batch.cu_seqlens_q[-1] + more]),
        seq_lens=np.concatenate([batch.seq_lens, nothing + np.int32(1)]),
        block_tables=np.concatenate([batch.block_tables, tables]),
        logit_rows=np.concatenate([batch.logit_rows, np.int32(batch.total_q - 1) + more]),
        padding=count,
    )
