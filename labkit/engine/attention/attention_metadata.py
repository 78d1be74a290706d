"""What a backend is told: of a layer once, and of a step what its layers share, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.kv_dtypes import ITEM_BYTES
from labkit.engine.attention.resolvers.resolver import Resolver

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A bound layer; layers of one ``kind`` are launched alike."""

    index: int  # which layer's pools
    kind: int  # number of what the layers have in common: all but ``index`` and ``sinks``
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # of the pools: float32, float16, bfloat16 (the reference: float64)
    query_dtype: str | None  # of queries, new keys and values; None: any, converted
    scale: float  # of the logits
    window: int | None  # only the last so many keys, the query's own included; None: all
    softcap: float | None  # c: logits become c * tanh(logit * scale / c); None: off
    # [num_heads], one more logit per head in the softmax denominator, unscaled; in the backend's
    # kind of array. None: off.
    sinks: Any

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of a key or value in the pools."""
        return self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def query_bytes(self) -> int:
        """Bytes of one head of a query."""
        return self.head_dim * ITEM_BYTES[self.query_dtype or self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV head's keys and values in a block."""
        return 2 * self.block_size * self.row_bytes


@dataclass(slots=True)
class AttentionMetadata:
    """A batch of ragged sequences over a paged KV cache, and what is launched on it."""

    cu_seqlens_q: Ints  # [num_seqs + 1], prefix sums of the query lengths
    seq_lens: Ints  # [num_seqs], context including the new tokens
    block_tables: Ints  # [num_seqs, max_blocks], padded with 0
    total_q: int  # packed query tokens
    num_seqs: int  # empty ones included
    max_query_len: int  # over the batch; 0 where there is none
    max_seq_len: int
    block_size: int  # tokens in a KV block
    resolver: Resolver  # how a kernel finds a unit's sequence
    lookup: Any  # its operand
    map_us: float  # the host's time of building the resolver's maps; 0 without maps
    # What a backend derived for each kind of layer (``AttentionLayer.kind``), at its first launch.
    prepared: dict[int | str, Any] = field(default_factory=dict)
    # What the launches since the last report left, for the backend's ``report``.
    launches: list[Any] = field(default_factory=list)
    # The prefix sums and block tables that it was built from, where the step after may be of the
    # same sequences: nobody can write to them, and a query is one token. None: it may not.
    lasting: tuple[Ints, Ints] | None = None
    _slots: NDArray[np.int64] | None = None

    @property
    def slot_mapping(self) -> NDArray[np.int64]:
        """Where new tokens go in the pools: [total_q], block * block_size + offset."""
        if self._slots is None:
            self._slots = _slots(
                self.block_tables, self.seq_lens, self.cu_seqlens_q, self.block_size
            )
        return self._slots

    def taken(self) -> list[Any]:
        """Return what the launches left, and forget it."""
        launches, self.launches = self.launches, []
        return launches

    def following(self, seq_lens: Ints, *, keep: bool) -> AttentionMetadata | None:
        """Return the metadata of a later step of ``lasting``; None: the tables do not hold it.

        ``keep``: what backends derived from this metadata holds for that one too.
        """
        width = self.block_tables.shape[1]
        if seq_lens.shape != self.seq_lens.shape or seq_lens.dtype != self.seq_lens.dtype:
            return None
        lengths = seq_lens.tolist()
        longest = max(lengths)
        if not 1 <= min(lengths) <= longest <= width * self.block_size:
            return None
        lens = np.array(seq_lens)
        lookup, map_us = self.resolver.lookup(self.cu_seqlens_q, lens)
        return AttentionMetadata(
            cu_seqlens_q=self.cu_seqlens_q,
            seq_lens=lens,
            block_tables=self.block_tables,
            total_q=self.total_q,
            num_seqs=self.num_seqs,
            max_query_len=1,
            max_seq_len=longest,
            block_size=self.block_size,
            resolver=self.resolver,
            lookup=lookup,
            map_us=map_us,
            prepared=self.prepared if keep else {},
            lasting=self.lasting,
        )


def build(
    resolver: Resolver,
    *,
    block_tables: Ints,
    seq_lens: Ints,
    cu_seqlens_q: Ints,
    num_blocks: int,
    block_size: int,
    total_q: int | None = None,
) -> AttentionMetadata:
    """Check a batch against pools of so many blocks, and derive its metadata.

    Raises
    ------
    ValueError
        One line that says what is wrong.
    """
    query_lens = _checked(block_tables, seq_lens, cu_seqlens_q, num_blocks, block_size, total_q)
    # Copies: the caller may reuse its arrays, and a view of an MLX array is read-only.
    cu, lens = np.array(cu_seqlens_q), np.array(seq_lens)
    lookup, map_us = resolver.lookup(cu, lens)
    lasting = None
    one_each = frozen(cu_seqlens_q) and frozen(block_tables) and (query_lens == 1).all()
    if one_each and 0 <= block_tables.min(initial=0) <= block_tables.max(initial=0) < num_blocks:
        lasting = cu_seqlens_q, block_tables
    return AttentionMetadata(
        cu_seqlens_q=cu,
        seq_lens=lens,
        block_tables=np.array(block_tables),
        total_q=int(cu[-1]),
        num_seqs=len(lens),
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        block_size=block_size,
        resolver=resolver,
        lookup=lookup,
        map_us=map_us,
        lasting=lasting,
    )


def frozen(array: Ints) -> bool:
    """Tell whether nobody can write to an array."""
    return array.base is None and not array.flags.writeable


def _slots(block_tables: Ints, seq_lens: Ints, cu: Ints, block_size: int) -> NDArray[np.int64]:
    """Return where each new token's key and value go in the pools."""
    query_lens = np.diff(cu)
    sequence = np.repeat(np.arange(len(seq_lens)), query_lens)
    first_position = seq_lens - query_lens - cu[:-1]
    position = np.arange(len(sequence)) + first_position[sequence]
    block, offset = np.divmod(position, block_size)
    return block_tables[sequence, block].astype(np.int64) * block_size + offset


def _checked(
    block_tables: Ints,
    seq_lens: Ints,
    cu_seqlens_q: Ints,
    num_blocks: int,
    block_size: int,
    total_q: int | None,
) -> Ints:
    """Check a step's batch against the pools and return its query lengths.

    Only the blocks of sequences with query tokens are looked at: the rest is padding.
    """
    _int32("block_tables", block_tables, ndim=2)
    _int32("seq_lens", seq_lens, ndim=1)
    _int32("cu_seqlens_q", cu_seqlens_q, ndim=1)
    num_seqs = len(seq_lens)
    if len(cu_seqlens_q) != num_seqs + 1:
        raise ValueError(
            f"cu_seqlens_q has {len(cu_seqlens_q)} entries; {num_seqs} sequences need "
            f"{num_seqs + 1}"
        )
    if len(block_tables) != num_seqs:
        raise ValueError(f"block_tables has {len(block_tables)} rows for {num_seqs} sequences")
    _prefix_sums(cu_seqlens_q, total_q)
    query_lens = np.diff(cu_seqlens_q)
    short = np.flatnonzero(seq_lens < query_lens)
    if len(short):
        s = short[0]
        raise ValueError(
            f"seq_lens[{s}] is {seq_lens[s]}: less than the {query_lens[s]} query tokens "
            f"of sequence {s}"
        )
    largest = _used_blocks(block_tables, seq_lens, query_lens, block_size)
    if largest >= num_blocks:
        raise ValueError(f"block_tables has block id {largest}: the pools have {num_blocks} blocks")
    return query_lens


def _prefix_sums(cu: NDArray[np.int32], total_q: int | None) -> None:
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens_q[0] is {cu[0]}: must be 0")
    # Compared, not subtracted: a difference of two int32 may wrap round.
    falls = np.flatnonzero(cu[1:] < cu[:-1])
    if len(falls):
        i = falls[0] + 1
        raise ValueError(f"cu_seqlens_q falls from {cu[i - 1]} to {cu[i]} at index {i}")
    if total_q is not None and cu[-1] != total_q:
        raise ValueError(f"cu_seqlens_q ends at {cu[-1]}, not at total_q={total_q}")


def _used_blocks(
    block_tables: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    query_lens: NDArray[np.int32],
    block_size: int,
) -> int:
    """Check the block ids that a query can read and return the largest (or -1)."""
    counts = np.where(query_lens > 0, -(-seq_lens // block_size), 0)
    width = block_tables.shape[1]
    long = np.flatnonzero(counts > width)
    if len(long):
        s = long[0]
        raise ValueError(
            f"seq_lens[{s}] is {seq_lens[s]}: needs {counts[s]} blocks of {block_size}, "
            f"block_tables has {width} columns"
        )
    used = np.where(np.arange(width) < counts[:, None], block_tables, 0)
    if used.size and used.min() < 0:
        s, b = np.argwhere(used < 0)[0]
        raise ValueError(f"block_tables[{s}, {b}] is {block_tables[s, b]}: negative block id")
    return int(used.max(initial=0)) if counts.any() else -1


def _int32(name: str, array: Any, *, ndim: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.int32:
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name} must be an array of int32, not {kind}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not {array.ndim}")
