"""What the layers of one step share: the batch as arrays, checked and derived once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import validate
from labkit.engine.attention.resolvers.resolver import Resolver

Ints = NDArray[np.int32]


@dataclass(slots=True)
class Plan:
    """A batch of ragged sequences over a paged KV cache, and what is launched on it.

    Parameters
    ----------
    cu_seqlens_q
        int32 [num_seqs + 1], prefix sums of the query lengths.
    seq_lens
        int32 [num_seqs], context including the new tokens.
    block_tables
        int32 [num_seqs, max_blocks], padded with 0.
    slot_mapping
        int64 [total_q], ``block * block_size + offset`` of every new token.
    total_q, num_seqs
        Packed query tokens; sequences, empty ones included.
    max_query_len, max_seq_len
        The largest of each over the batch; 0 where there is none.
    block_size
        Tokens in a KV block.
    resolver, lookup
        How a kernel finds a unit's sequence, and its operand.
    map_us
        Host time (us) of building the resolver's maps; 0 without maps.
    prepared
        What a backend derived for each kind of layer (``Layer.kind``), at its first launch.
    launches
        What the launches since the last report left, for the backend's ``report``.
    """

    cu_seqlens_q: Ints
    seq_lens: Ints
    block_tables: Ints
    slot_mapping: NDArray[np.int64]
    total_q: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    resolver: Resolver
    lookup: Any
    map_us: float
    prepared: dict[int | str, Any] = field(default_factory=dict)
    launches: list[Any] = field(default_factory=list)

    def taken(self) -> list[Any]:
        """Return what the launches left, and forget it."""
        launches, self.launches = self.launches, []
        return launches


def build(
    resolver: Resolver,
    *,
    block_tables: Ints,
    seq_lens: Ints,
    cu_seqlens_q: Ints,
    num_blocks: int,
    block_size: int,
    total_q: int | None = None,
) -> Plan:
    """Check a batch against pools of so many blocks, and derive its plan.

    Raises
    ------
    ValueError
        One line that says what is wrong.
    """
    query_lens = validate.batch(
        block_tables=block_tables,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        num_blocks=num_blocks,
        block_size=block_size,
        total_q=total_q,
    )
    # Copies: the caller may reuse its arrays, and a view of an MLX array is read-only.
    cu, lens = np.array(cu_seqlens_q), np.array(seq_lens)
    lookup, map_us = resolver.lookup(cu, lens)
    return Plan(
        cu_seqlens_q=cu,
        seq_lens=lens,
        block_tables=np.array(block_tables),
        slot_mapping=_slots(block_tables, lens, cu, query_lens, block_size),
        total_q=int(cu[-1]),
        num_seqs=len(lens),
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        block_size=block_size,
        resolver=resolver,
        lookup=lookup,
        map_us=map_us,
    )


def _slots(
    block_tables: Ints, seq_lens: Ints, cu: Ints, query_lens: Ints, block_size: int
) -> NDArray[np.int64]:
    """Return where each new token's key and value go in the pools."""
    sequence = np.repeat(np.arange(len(seq_lens)), query_lens)
    first_position = seq_lens - query_lens - cu[:-1]
    position = np.arange(len(sequence)) + first_position[sequence]
    block, offset = np.divmod(position, block_size)
    return block_tables[sequence, block].astype(np.int64) * block_size + offset
