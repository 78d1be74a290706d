"""A step's chunks as packed arrays, built once on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.engine.kv_layout.kv_cache import BlockTable, KVCache
from labkit.engine.request import RequestState
from labkit.engine.scheduler_output import ScheduledChunk, SchedulerOutput

Ints = NDArray[np.int32]
# In the place of a token that the step in flight will sample.
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Batch:
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

    @property
    def mixed(self) -> bool:
        """Whether prompt tokens and generated tokens share the step."""
        return 0 < self.prefill_tokens < self.num_tokens


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
    """Return int32 [tables, longest], padded with 0, the null block."""
    stacked = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table.block_ids
    return stacked


class InputBuilder:
    """Turns scheduled chunks into a ``Batch``.

    Block tables are stacked again only when one of the step's tables is another object.
    """

    def __init__(self, cache: KVCache, cut: Cut = window) -> None:
        self._cache = cache
        self._cut = cut
        self._stacked_for: list[BlockTable] = []
        self._stacked: Ints = np.zeros((0, 0), np.int32)

    def build(self, output: SchedulerOutput) -> Batch:
        """Pack the chunks of a step in their order."""
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

    def _block_tables(self, tables: list[BlockTable]) -> Ints:
        if tables != self._stacked_for:
            self._stacked_for, self._stacked = tables, stack(tables)
        return self._stacked
