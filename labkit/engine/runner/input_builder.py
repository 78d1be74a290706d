"""Build a step's ``Batch`` from its scheduled chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from labkit.engine.batch import PLACEHOLDER_TOKEN_ID, Batch, Ints, pack, read_only
from labkit.engine.kv_cache_interface import BlockTable, KVCacheManager
from labkit.engine.request import RequestState, ScoredRows
from labkit.engine.scheduler.scheduler_output import ScheduledChunk, SchedulerOutput

# Returns the segments, each (start, length), for a chunk and its number of draft tokens. A segment
# is a run of query tokens with causal attention among them: an entry of ``cu_seqlens_q``.
SegmentLayout = Callable[[ScheduledChunk, int], list[tuple[int, int]]]


def window(chunk: ScheduledChunk, drafts: int) -> list[tuple[int, int]]:
    """Return the chunk and its drafts as one segment, within which attention is causal."""
    return [(chunk.start, chunk.num_tokens + drafts)]


def staircase(chunk: ScheduledChunk, drafts: int) -> list[tuple[int, int]]:
    """Return a segment for the chunk and one for each draft token.

    Each draft's segment has one token and one more token of context than the previous segment. The
    segments share a block table, and all keys are written before any is read, so a draft attends
    to the drafts before it.
    """
    stop = chunk.start + chunk.num_tokens
    return [(chunk.start, chunk.num_tokens), *((stop + i, 1) for i in range(drafts))]


def stack_block_tables(tables: Sequence[BlockTable]) -> Ints:
    """Return block tables as a read-only int32 array [tables, max_blocks], padded with 0."""
    return _stack([table.block_ids for table in tables])


def _stack(rows: Sequence[Ints]) -> Ints:
    stacked = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, blocks in zip(stacked, rows, strict=True):
        row[: len(blocks)] = blocks
    return read_only(stacked)


class InputBuilder:
    """Builds the ``Batch`` of a step.

    ``segment_layout`` determines how draft tokens become segments. The stacked block tables are
    reused while the steps have the same ``BlockTable`` objects. ``cu_seqlens_q`` and ``logit_rows``
    of pure decodes are reused while the number of requests is the same.
    """

    def __init__(self, cache: KVCacheManager, segment_layout: SegmentLayout = window) -> None:
        self._cache = cache
        self._has_states = cache.has_states
        self._segment_layout = segment_layout
        self._stacked_tables: list[BlockTable] = []
        self._block_tables_array: Ints = np.zeros((0, 0), np.int32)
        self._window_tables: tuple[Ints, ...] = ()
        self._cu_seqlens_q: Ints = read_only(np.zeros(1, np.int32))  # of pure decodes: 0, 1, ...
        self._logit_rows: Ints = read_only(np.zeros(0, np.int32))

    def build(self, output: SchedulerOutput) -> Batch:
        if output.is_decode_only:
            return self._build_decodes(output)
        tokens: list[int] = []
        rows: list[int] = []
        sampling: list[RequestState] = []
        placeholders: list[tuple[int, str]] = []
        segments: list[tuple[int, int]] = []
        tables: list[BlockTable] = []
        scored: list[ScoredRows] = []
        scored_rows: list[int] = []
        for chunk in output.chunks:
            state, stop = chunk.state, chunk.start + chunk.num_tokens
            drafts = output.drafts.get(state.request_id, ())
            if wanted := chunk.scored_rows:
                offset = len(tokens) - chunk.start
                scored_rows += range(wanted.start + offset, wanted.stop + offset)
                scored.append(ScoredRows(state, wanted.start, len(wanted)))
            tokens += state.token_ids[chunk.start : stop]
            if stop > state.num_tokens:
                placeholders.append((len(tokens), state.request_id))
                tokens.append(PLACEHOLDER_TOKEN_ID)
            if chunk.samples:
                rows += range(len(tokens) - 1, len(tokens) + len(drafts))
                sampling.append(state)
                sampling += [state.with_output(drafts[: i + 1]) for i in range(len(drafts))]
            tokens += drafts
            chunk_segments = self._segment_layout(chunk, len(drafts))
            segments += chunk_segments
            tables += [self._cache.table(state.request_id)] * len(chunk_segments)
        block_tables = self._block_tables(tables)
        return pack(
            tokens,
            segments,
            block_tables,
            rows + scored_rows,
            sampling,
            prefill_tokens=sum(chunk.num_tokens for chunk in output.chunks if chunk.is_prefill),
            placeholders=tuple(placeholders),
            scored=tuple(scored),
            window_tables=self._window_tables,
            states=self._cache.plan_states(output) if self._has_states else None,
        )

    def _build_decodes(self, output: SchedulerOutput) -> Batch:
        tokens, positions, seq_lens, tables, sampling, placeholders = [], [], [], [], [], []
        for chunk in output.chunks:
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
        if count != len(self._logit_rows):
            self._cu_seqlens_q = read_only(np.arange(count + 1, dtype=np.int32))
            self._logit_rows = read_only(np.arange(count, dtype=np.int32))
        return Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            cu_seqlens_q=self._cu_seqlens_q,
            seq_lens=np.array(seq_lens, np.int32),
            block_tables=self._block_tables(tables),
            window_tables=self._window_tables,
            logit_rows=self._logit_rows,
            sampling=tuple(sampling),
            prefill_tokens=0,
            placeholders=tuple(placeholders),
            states=self._cache.plan_states(output) if self._has_states else None,
        )

    def _block_tables(self, tables: list[BlockTable]) -> Ints:
        if tables != self._stacked_tables:
            self._stacked_tables, self._block_tables_array = tables, stack_block_tables(tables)
            by_window = zip(*(table.windows for table in tables), strict=True)
            self._window_tables = tuple(map(_stack, by_window))
        return self._block_tables_array
