"""A step's lengths, block tables and slots, checked once for all layers; a layer's constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.precision.kv_dtypes import row_bytes
from labkit.engine.attention.sequence_resolvers.sequence_resolver import Resolver

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of a layer. Layers of one ``kind`` differ only in ``index`` and ``sinks``."""

    index: int  # the layer's index in the pools
    kind: int  # layers of the same kind share a kernel, its grid and its parameters
    num_q_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    block_size: int
    dtype: str  # of the pools: a key of ``kv_dtypes.POOL_DTYPES``; the reference also has float64
    query_dtype: str | None  # of queries, new keys and values; None: any dtype is converted
    scale: float  # of the logits
    window: int | None  # number of keys that a query sees, including its own; None: all
    softcap: float | None  # c: logits become c * tanh(logit * scale / c); None: off
    # [num_q_heads], an unscaled logit per head that is added to the softmax denominator (an array
    # of the kind that the backend uses). None: off.
    sinks: Any
    value_dim: int  # of values and outputs
    latent: bool = False  # the first ``value_dim`` numbers of a key are the value

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key of one head in the pools."""
        return row_bytes(self.dtype, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value of one head in the pools."""
        values = 0 if self.latent else row_bytes(self.dtype, self.value_dim)
        return self.row_bytes + values

    @property
    def query_bytes(self) -> int:
        """Bytes of one token's query of one head."""
        return row_bytes(self.query_dtype or self.dtype, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV head's keys and values in a block."""
        return self.block_size * self.token_bytes


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """A step's batch of ragged sequences over a paged KV cache.

    The arrays never change. The backend fills ``prepared`` and ``launches`` while the step's layers
    run.
    """

    cu_seqlens_q: Int32Array  # [num_seqs + 1], prefix sums of the query lengths
    seq_lens: Int32Array  # [num_seqs], context including the new tokens
    block_tables: Int32Array  # [num_seqs, max_blocks], padded with 0
    total_q: int  # packed query tokens
    num_seqs: int  # including sequences without query tokens
    max_query_len: int  # 0 in an empty batch
    max_seq_len: int
    block_size: int  # tokens in a KV block
    resolver: Resolver  # finds the sequence that a unit of the grid works for
    lookup: Any  # the resolver's operand
    build_us: float  # host time (us) of building the resolver's maps; 0 without maps
    # Data that the backend derives from the batch at the first launch that needs them. The type is
    # the backend's own (``PagedBackend.new_prepared``). Steps of the same sequences may share them.
    prepared: Any = None
    # The step's launch log: ``forward`` appends, ``report`` drains.
    launches: list[Any] = field(default_factory=list)
    # Host times (us) of converting the maps for a device; the backend appends them.
    conversions_us: list[float] = field(default_factory=list)

    @property
    def map_us(self) -> float:
        """Host time (us) of building the resolver's maps, and of converting those read so far."""
        return self.build_us + sum(self.conversions_us)

    @cached_property
    def slot_mapping(self) -> NDArray[np.int64]:
        """Slot of each new token in the pools: [total_q], block * block_size + offset."""
        return _slots(self.block_tables, self.seq_lens, self.cu_seqlens_q, self.block_size)

    def drain_launches(self) -> list[Any]:
        """Return the logged launches and empty the log."""
        drained = self.launches[:]
        self.launches.clear()
        return drained

    def decodes_within(self, num_blocks: int) -> bool:
        """Return whether each sequence has one query token and all block ids are in the pools.

        If so, a later decode step of the same sequences needs a check of its lengths only.
        ``num_blocks`` is the number of blocks of the pools.
        """
        tables = self.block_tables
        one_token_each = self.max_query_len == 1 and self.total_q == self.num_seqs
        return bool(
            one_token_each and 0 <= tables.min(initial=0) <= tables.max(initial=0) < num_blocks
        )

    def advance(self, seq_lens: Int32Array, prepared: Any) -> AttentionMetadata | None:
        """Return the metadata of a later decode step of the same sequences and block tables.

        Return None if ``seq_lens`` does not fit the tables. Call this only if ``decodes_within``
        is true.
        """
        capacity = self.block_tables.shape[1] * self.block_size
        if seq_lens.shape != self.seq_lens.shape or seq_lens.dtype != self.seq_lens.dtype:
            return None
        lengths = seq_lens.tolist()
        longest = max(lengths)
        if not 1 <= min(lengths) <= longest <= capacity:
            return None
        lens = np.array(seq_lens)
        lookup, build_us = self.resolver.lookup(self.cu_seqlens_q, lens)
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
            build_us=build_us,
            prepared=prepared,
        )


def build(
    resolver: Resolver,
    *,
    block_tables: Int32Array,
    seq_lens: Int32Array,
    cu_seqlens_q: Int32Array,
    num_blocks: int,
    block_size: int,
    total_q: int | None = None,
    prepared: Any = None,
) -> AttentionMetadata:
    """Return a batch's metadata, or raise ``ValueError`` that names an array that is wrong."""
    query_lens = _query_lens(block_tables, seq_lens, cu_seqlens_q, num_blocks, block_size, total_q)
    # Copies: the caller may reuse its arrays, and a view of an MLX array is read-only.
    cu, lens = np.array(cu_seqlens_q), np.array(seq_lens)
    lookup, build_us = resolver.lookup(cu, lens)
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
        build_us=build_us,
        prepared=prepared,
    )


TablesKey = tuple[bytes, tuple[int, ...], bytes]


def tables_key(cu_seqlens_q: Any, block_tables: Any) -> TablesKey | None:
    """Return a key that is equal for equal arrays, or None if an array is not int32."""
    for array in (cu_seqlens_q, block_tables):
        if not isinstance(array, np.ndarray) or array.dtype != np.int32:
            return None
    return cu_seqlens_q.tobytes(), block_tables.shape, block_tables.tobytes()


def _slots(
    block_tables: Int32Array, seq_lens: Int32Array, cu: Int32Array, block_size: int
) -> NDArray[np.int64]:
    """Return the slot of each new token's key and value in the pools."""
    query_lens = np.diff(cu)
    sequence = np.repeat(np.arange(len(seq_lens)), query_lens)
    first_position = seq_lens - query_lens - cu[:-1]
    position = np.arange(len(sequence)) + first_position[sequence]
    block, offset = np.divmod(position, block_size)
    return block_tables[sequence, block].astype(np.int64) * block_size + offset


def _query_lens(
    block_tables: Int32Array,
    seq_lens: Int32Array,
    cu_seqlens_q: Int32Array,
    num_blocks: int,
    block_size: int,
    total_q: int | None,
) -> Int32Array:
    """Check a step's batch against the pools and return its query lengths."""
    _check_int32("block_tables", block_tables, ndim=2)
    _check_int32("seq_lens", seq_lens, ndim=1)
    _check_int32("cu_seqlens_q", cu_seqlens_q, ndim=1)
    num_seqs = len(seq_lens)
    if len(cu_seqlens_q) != num_seqs + 1:
        raise ValueError(
            f"cu_seqlens_q has length {len(cu_seqlens_q)}; it must be {num_seqs + 1}, the number "
            "of sequences plus 1"
        )
    if len(block_tables) != num_seqs:
        raise ValueError(
            f"block_tables has length {len(block_tables)}; it must be {num_seqs}, the number of "
            "sequences"
        )
    _check_prefix_sums(cu_seqlens_q, total_q)
    query_lens = np.diff(cu_seqlens_q)
    too_short = np.flatnonzero(seq_lens < query_lens)
    if len(too_short):
        s = too_short[0]
        raise ValueError(
            f"seq_lens[{s}] is {seq_lens[s]}, less than the number of query tokens of sequence "
            f"{s}, which is {query_lens[s]}"
        )
    largest = _largest_used_block(block_tables, seq_lens, query_lens, block_size)
    if largest >= num_blocks:
        raise ValueError(
            f"block_tables has block id {largest}; ids must be below {num_blocks}, the size of the "
            "pools"
        )
    return query_lens


def _check_prefix_sums(cu: Int32Array, total_q: int | None) -> None:
    """Check that ``cu_seqlens_q`` starts at 0, never decreases and ends at ``total_q``."""
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens_q[0] is {cu[0]}; it must be 0")
    # Compared, not subtracted: a difference of two int32 may overflow.
    decreases = np.flatnonzero(cu[1:] < cu[:-1])
    if len(decreases):
        i = decreases[0] + 1
        raise ValueError(f"cu_seqlens_q falls from {cu[i - 1]} to {cu[i]} at index {i}")
    if total_q is not None and cu[-1] != total_q:
        raise ValueError(f"cu_seqlens_q ends at {cu[-1]}, not at total_q={total_q}")


def _largest_used_block(
    block_tables: Int32Array, seq_lens: Int32Array, query_lens: Int32Array, block_size: int
) -> int:
    """Check the block ids that a query can read; return the largest, or -1 if there are none."""
    counts = np.where(query_lens > 0, -(-seq_lens // block_size), 0)
    width = block_tables.shape[1]
    too_long = np.flatnonzero(counts > width)
    if len(too_long):
        s = too_long[0]
        raise ValueError(
            f"seq_lens[{s}] is {seq_lens[s]} and needs {counts[s]} blocks of "
            f"{block_size} tokens, but block_tables has only {width} columns"
        )
    used = np.where(np.arange(width) < counts[:, None], block_tables, 0)
    if used.size and used.min() < 0:
        s, b = np.argwhere(used < 0)[0]
        raise ValueError(
            f"block_tables[{s}, {b}] is {block_tables[s, b]}; a block id must be 0 or more"
        )
    return int(used.max(initial=0)) if counts.any() else -1


def _check_int32(name: str, array: Any, *, ndim: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.int32:
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name} must be an array of int32, not {kind}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have ndim={ndim}, not {array.ndim}")
