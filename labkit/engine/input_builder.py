"""A step's chunks as packed arrays, built once on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.engine.kv_layout.base import BlockTable, KVCache
from labkit.engine.request import RequestState
from labkit.engine.scheduler_output import SchedulerOutput

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, packed sequence after sequence, decodes first.

    ``tokens`` and ``positions`` are int32 [total_q]; ``cu_seqlens_q`` int32
    [num_seqs + 1]; ``seq_lens`` int32 [num_seqs], contexts with the new tokens;
    ``block_tables`` int32 [num_seqs, max_blocks], padded with 0; ``logit_rows`` int32,
    the packed rows after which a token is sampled, for the requests ``sampling``.
    """

    tokens: Ints
    positions: Ints
    cu_seqlens_q: Ints
    seq_lens: Ints
    block_tables: Ints
    logit_rows: Ints
    sampling: tuple[RequestState, ...]
    prefill_tokens: int

    @property
    def total_q(self) -> int:
        """Tokens computed."""
        return len(self.tokens)

    @property
    def mixed(self) -> bool:
        """Whether prompt tokens and generated tokens share the step."""
        return 0 < self.prefill_tokens < self.total_q


class InputBuilder:
    """Turns scheduled chunks into a ``Batch``.

    Block tables are stacked again only when one of the step's tables is another object.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._stacked_for: list[BlockTable] = []
        self._stacked: Ints = np.zeros((0, 0), np.int32)

    def build(self, output: SchedulerOutput) -> Batch:
        """Pack the chunks of a step in their order."""
        chunks = output.chunks
        lengths = [chunk.num_tokens for chunk in chunks]
        cu_seqlens_q = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens_q[1:])
        total = int(cu_seqlens_q[-1])
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.state.token_ids[chunk.start : chunk.start + chunk.num_tokens]
        starts = np.fromiter((chunk.start for chunk in chunks), np.int32, len(chunks))
        # Packed index minus where the chunk begins, plus where its tokens begin.
        shift = starts - cu_seqlens_q[:-1]
        positions = np.arange(total, dtype=np.int32) + np.repeat(shift, lengths)
        last = [i for i, chunk in enumerate(chunks) if chunk.samples]
        return Batch(
            tokens=np.asarray(tokens, np.int32),
            positions=positions,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=starts + np.asarray(lengths, np.int32),
            block_tables=self._block_tables([chunk.state for chunk in chunks]),
            logit_rows=cu_seqlens_q[1:][last] - np.int32(1),
            sampling=tuple(chunks[i].state for i in last),
            prefill_tokens=sum(chunk.num_tokens for chunk in chunks if chunk.is_prefill),
        )

    def _block_tables(self, states: list[RequestState]) -> Ints:
        tables = [self._cache.table(state.request_id) for state in states]
        if tables != self._stacked_for:
            stacked = np.zeros((len(tables), max(map(len, tables))), np.int32)
            for row, table in zip(stacked, tables, strict=True):
                row[: len(table)] = table.block_ids
            self._stacked_for, self._stacked = tables, stacked
        return self._stacked
