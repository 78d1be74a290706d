"""The batch of a step: its tokens and sequences as packed arrays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.recurrent_states.state_slots import StatePlan
from labkit.engine.request import RequestState, ScoredRows

Ints = NDArray[np.int32]
# The placeholder for a token that the step in flight will sample.
PLACEHOLDER_TOKEN_ID = -1


class Batch(NamedTuple):
    """One step's tokens, packed sequence after sequence, decodes first."""

    tokens: Ints  # [total_q]
    positions: Ints  # [total_q]
    cu_seqlens_q: Ints  # [num_seqs + 1], prefix sums of the query lengths
    seq_lens: Ints  # [num_seqs], context including the new tokens
    block_tables: Ints  # [num_seqs, max_blocks], padded with 0
    logit_rows: Ints  # packed rows whose logits are computed
    sampling: tuple[RequestState, ...]  # the requests of the first rows in ``logit_rows``
    prefill_tokens: int = 0
    # Row and request id of every token that the step in flight will sample.
    placeholders: tuple[tuple[int, str], ...] = ()
    # Prompt rows to score. Their logits follow those of ``sampling`` in ``logit_rows``.
    scored: tuple[ScoredRows, ...] = ()
    padding: int = 0  # rows at the end that belong to no request
    # What the step does with recurrent states, if the model has any.
    states: StatePlan | None = None
    # As ``block_tables``, in each group of layers with a sliding window and pools of their own.
    window_tables: tuple[Ints, ...] = ()

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
        """The number of segments, not counting padding.

        A chunk and its draft tokens are one segment (``input_builder.window``), or the chunk and
        each of its draft tokens are separate segments (``input_builder.staircase``).
        """
        return len(self.seq_lens) - self.padding


def pack(
    tokens: list[int],
    segments: list[tuple[int, int]],
    block_tables: Ints,
    rows: list[int],
    sampling: list[RequestState],
    **others: Any,
) -> Batch:
    """Return the batch of packed tokens.

    ``segments`` has the (start, length) of each segment in its sequence, and ``rows`` becomes
    ``Batch.logit_rows``. ``others`` are the fields of ``Batch`` from ``prefill_tokens`` on, except
    ``padding``.
    """
    starts, lengths = np.array(segments, np.int32).reshape(-1, 2).T
    cu_seqlens_q = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    # A token's position is its packed index plus the offset of its segment.
    offsets = starts - cu_seqlens_q[:-1]
    return Batch(
        tokens=np.asarray(tokens, np.int32),
        positions=np.arange(len(tokens), dtype=np.int32) + np.repeat(offsets, lengths),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=starts + lengths,
        block_tables=block_tables,
        logit_rows=np.asarray(rows, np.int32),
        sampling=tuple(sampling),
        **others,
    )


def with_padding(batch: Batch, count: int) -> Batch:
    """Return the batch with ``count`` padding rows at the end, which belong to no request."""
    zeros, steps = np.zeros(count, np.int32), np.arange(1, count + 1, dtype=np.int32)

    def padded(tables: Ints) -> Ints:
        return np.concatenate([tables, np.zeros((count, tables.shape[1]), np.int32)])

    return batch._replace(
        tokens=np.concatenate([batch.tokens, zeros]),
        positions=np.concatenate([batch.positions, zeros]),
        cu_seqlens_q=np.concatenate([batch.cu_seqlens_q, batch.cu_seqlens_q[-1] + steps]),
        seq_lens=np.concatenate([batch.seq_lens, zeros + np.int32(1)]),
        block_tables=padded(batch.block_tables),
        window_tables=tuple(map(padded, batch.window_tables)),
        logit_rows=np.concatenate([batch.logit_rows, np.int32(batch.total_q - 1) + steps]),
        padding=count,
    )


def split(batch: Batch) -> Iterator[Batch]:
    """Yield a batch for each segment, without padding, states, and requests to sample."""
    starts, logit_rows = batch.cu_seqlens_q.tolist(), np.sort(batch.logit_rows)
    for s, (start, stop) in enumerate(pairwise(starts)):
        rows = logit_rows[(logit_rows >= start) & (logit_rows < stop)] - np.int32(start)
        yield batch._replace(
            tokens=batch.tokens[start:stop],
            positions=batch.positions[start:stop],
            cu_seqlens_q=np.array([0, stop - start], np.int32),
            seq_lens=batch.seq_lens[s : s + 1],
            block_tables=batch.block_tables[s : s + 1],
            window_tables=tuple(table[s : s + 1] for table in batch.window_tables),
            logit_rows=rows,
            sampling=(),
            prefill_tokens=stop - start if stop - start > 1 else 0,
            placeholders=(),
            scored=(),
        )


def read_only(array: Ints) -> Ints:
    """Make an array read-only, because several batches share it, and return the array."""
    array.flags.writeable = False
    return array
