"""A step's tokens and sequences as packed arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.request import RequestState

Ints = NDArray[np.int32]
# In the place of a token that the step in flight will sample.
PLACEHOLDER_TOKEN_ID = -1


class Batch(NamedTuple):
    """One step's tokens, packed sequence after sequence, decodes first.

    ``tokens`` and ``positions`` are int32 [total_q]; ``cu_seqlens_q`` int32
    [num_seqs + 1]; ``seq_lens`` int32 [num_seqs], contexts with the new tokens;
    ``block_tables`` int32 [num_seqs, max_blocks], padded with 0; ``logit_rows`` int32,
    the packed rows after which a token is sampled, for the requests ``sampling``.
    ``placeholders``: row and request id of every token that the step in flight will sample;
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
    placeholders: tuple[tuple[int, str], ...] = ()
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


def pack(
    tokens: list[int],
    segments: list[tuple[int, int]],
    block_tables: Ints,
    rows: list[int],
    sampling: list[RequestState],
    *,
    prefill_tokens: int = 0,
    placeholders: tuple[tuple[int, str], ...] = (),
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
        placeholders=placeholders,
    )


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


def freeze(array: Ints) -> Ints:
    """Return a new array that nobody will write to."""
    array.flags.writeable = False
    return array
