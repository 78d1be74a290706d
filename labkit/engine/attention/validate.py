"""The checks of the attention operation: one text for one mistake, in every backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_HEAD_DIM = 256


def batch(
    *,
    block_tables: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    cu_seqlens_q: NDArray[np.int32],
    block_size: int,
    total_q: int | None,
) -> int:
    """Check a step's batch and return the largest block id that a query can read (or -1).

    Only the blocks of sequences with query tokens are looked at: the rest is padding.

    Raises
    ------
    ValueError
        One line that says what is wrong.
    """
    _int32("block_tables", block_tables, ndim=2)
    _int32("seq_lens", seq_lens, ndim=1)
    _int32("cu_seqlens_q", cu_seqlens_q, ndim=1)
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: allowed are 1 or more (tokens)")
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
    return _used_blocks(block_tables, seq_lens, query_lens, block_size)


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


def operands(
    q: NDArray[Any],
    k_pool: NDArray[Any],
    v_pool: NDArray[Any],
    *,
    total_q: int,
    block_size: int,
    max_block_id: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: NDArray[Any] | None,
    out: NDArray[Any] | None,
    kept: Sequence[np.dtype[Any]] = (),
) -> None:
    """Check one layer's arrays and options against the step's batch.

    ``kept``: the dtypes that pools may have besides that of ``q``.

    Raises
    ------
    ValueError
        One line that says what is wrong.
    """
    if q.ndim != 3 or q.shape[0] != total_q:
        raise ValueError(
            f"q must have shape [total_q={total_q}, num_q_heads, head_dim], not {list(q.shape)}"
        )
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape:
        raise ValueError(
            "k_pool and v_pool must have one shape [num_blocks, block_size, num_kv_heads, "
            f"head_dim], not {list(k_pool.shape)} and {list(v_pool.shape)}"
        )
    if k_pool.dtype != v_pool.dtype or k_pool.dtype not in (q.dtype, *kept):
        raise ValueError(
            f"q, k_pool and v_pool must have one dtype, not {q.dtype}, {k_pool.dtype}, "
            f"{v_pool.dtype}"
        )
    num_blocks, pool_block_size, num_kv_heads, head_dim = k_pool.shape
    if pool_block_size != block_size:
        raise ValueError(f"the pools have blocks of {pool_block_size}, the plan of {block_size}")
    if q.shape[2] != head_dim:
        raise ValueError(f"q has head size {q.shape[2]}, the pools have {head_dim}")
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head size {head_dim}: allowed are multiples of 16 from 16 to {MAX_HEAD_DIM}"
        )
    if num_kv_heads < 1 or q.shape[1] < 1 or q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {num_kv_heads} KV heads")
    if max_block_id >= num_blocks:
        raise ValueError(
            f"block_tables has block id {max_block_id}: the pools have {num_blocks} blocks"
        )
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(
            f"out must be {q.dtype} {list(q.shape)}, not {out.dtype} {list(out.shape)}"
        )
    if out is not None and not out.flags.c_contiguous:
        raise ValueError("out must be contiguous")
    options(q.shape[1], scale=scale, window=window, softcap=softcap, sinks=sinks)


def options(
    num_q_heads: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: NDArray[Any] | None,
) -> None:
    """Check the options of one layer; ValueError with one line that says what is wrong."""
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be a finite number")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: allowed are 1 or more (keys), or None")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap={softcap}: must be above 0, or None")
    if sinks is not None and sinks.shape != (num_q_heads,):
        raise ValueError(f"sinks must have shape [{num_q_heads}], not {list(sinks.shape)}")


def float32(*arrays: NDArray[Any]) -> None:
    """Check that a CPU kernel can read these arrays; ValueError otherwise.

    Half precision is refused: the CPU computes it one element at a time.
    """
    for array in arrays:
        if array.dtype != np.float32:
            raise ValueError(
                f"attention on device cpu takes float32, not {array.dtype}: half precision "
                "is scalar there"
            )


def new_keys(
    k: NDArray[Any],
    v: NDArray[Any],
    k_pool: NDArray[Any],
    v_pool: NDArray[Any],
    slot_mapping: NDArray[np.int64],
    kept: Sequence[np.dtype[Any]] = (),
) -> None:
    """Check the arrays of a write; ValueError with one line that says what is wrong.

    ``kept``: the dtypes that pools may have besides that of ``k`` and ``v``.
    """
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape:
        raise ValueError(
            "k_pool and v_pool must have one shape [num_blocks, block_size, num_kv_heads, "
            f"head_dim], not {list(k_pool.shape)} and {list(v_pool.shape)}"
        )
    shape = (len(slot_mapping), *k_pool.shape[2:])
    if k.shape != shape or v.shape != shape:
        raise ValueError(
            f"k and v must have shape {list(shape)}, not {list(k.shape)} and {list(v.shape)}"
        )
    same = k.dtype == v.dtype and k_pool.dtype == v_pool.dtype
    if not same or k_pool.dtype not in (k.dtype, *kept):
        raise ValueError(
            f"k, v, k_pool and v_pool must have one dtype, not {k.dtype}, {v.dtype}, "
            f"{k_pool.dtype}, {v_pool.dtype}"
        )
    if not (k_pool.flags.c_contiguous and v_pool.flags.c_contiguous):
        raise ValueError("k_pool and v_pool must be contiguous: they are written in place")
    slots = k_pool.shape[0] * k_pool.shape[1]
    if len(slot_mapping) and slot_mapping.max() >= slots:
        raise ValueError(
            f"slot_mapping has slot {slot_mapping.max()}: the pools have {slots} slots"
        )
