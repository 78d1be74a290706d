"""What the layers of one step share: the batch as arrays, checked and derived once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import validate
from labkit.engine.attention.resolvers import Lookup, Resolver
from labkit.metal.dispatch import BQ


@dataclass(frozen=True)
class AttentionMetadata:
    """A batch of ragged sequences over a paged KV cache.

    Parameters
    ----------
    cu_seqlens_q
        int32 [num_seqs + 1], prefix sums of the query lengths.
    seq_lens
        int32 [num_seqs], context including the new tokens.
    block_tables
        int32 [num_seqs, max_blocks], padded with 0.
    slot_mapping
        int64 [total_q], ``block * block_size + offset`` of every new token; -1 is not
        written.
    total_q, num_seqs
        Packed query tokens; sequences, empty ones included.
    max_query_len, max_seq_len
        The largest of each over the batch; 0 where there is none.
    max_block_id
        Largest block id that a query can read; -1 where there is none.
    block_size
        Tokens in a KV block.
    resolver, lookup
        The resolver's name and its operand in the kernel.
    map_us
        Host time (us) of building the resolver's maps; 0 without maps.
    """

    cu_seqlens_q: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    total_q: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    max_block_id: int
    block_size: int
    resolver: str
    lookup: Lookup
    map_us: float

    @property
    def has_prefill(self) -> bool:
        """Tell whether there are more query tokens than sequences."""
        return self.total_q > self.num_seqs


def build(
    resolver: Resolver,
    *,
    block_tables: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    cu_seqlens_q: NDArray[np.int32],
    block_size: int,
    total_q: int | None = None,
) -> AttentionMetadata:
    """Check a batch and derive its metadata.

    Parameters
    ----------
    resolver
        Builds the kernel's operand from ``cu_seqlens_q``.
    block_tables, seq_lens, cu_seqlens_q, block_size, total_q
        As in ``AttentionBackend.plan``.

    Raises
    ------
    ValueError
        One line that says what is wrong.
    """
    max_block_id = validate.batch(
        block_tables=block_tables,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        block_size=block_size,
        total_q=total_q,
    )
    # Copies: the caller may reuse its arrays, and a view of an MLX array is read-only.
    cu = np.array(cu_seqlens_q)
    num_tokens = int(cu[-1])
    lookup, map_us = resolver.lookup(cu, np.array(seq_lens), BQ)
    return AttentionMetadata(
        cu_seqlens_q=cu,
        seq_lens=np.array(seq_lens),
        block_tables=np.array(block_tables),
        slot_mapping=slot_mapping(block_tables, seq_lens, cu, block_size),
        total_q=num_tokens,
        num_seqs=len(seq_lens),
        max_query_len=int(np.diff(cu).max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        max_block_id=max_block_id,
        block_size=block_size,
        resolver=resolver.name,
        lookup=lookup,
        map_us=map_us,
    )


def slot_mapping(
    block_tables: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    cu_seqlens_q: NDArray[np.int32],
    block_size: int,
) -> NDArray[np.int64]:
    """Return int64 [total_q]: where each new token's key and value go in the pools."""
    query_lens = np.diff(cu_seqlens_q)
    sequence = np.repeat(np.arange(len(seq_lens)), query_lens)
    first_position = seq_lens - query_lens - cu_seqlens_q[:-1]
    position = np.arange(len(sequence)) + first_position[sequence]
    block, offset = np.divmod(position, block_size)
    return block_tables[sequence, block].astype(np.int64) * block_size + offset
