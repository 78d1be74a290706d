"""The launches: a grid of units, taken from a queue by one worker per thread.

Units cost differently (contexts are ragged, causal rows grow), so a worker takes the next
one when it is free. What a unit computes does not depend on who takes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from labkit.engine.attention.cpu.jit import inner, kernel
from labkit.engine.attention.cpu.lookups import find_qblock, find_token, resolver_id
from labkit.engine.attention.cpu.rows import Layer, Scratch, Work, attend_rows
from labkit.engine.attention.cpu.tiles import KEYS, ROWS, take_ticket
from labkit.engine.attention.metadata import BQ
from labkit.engine.attention.report import KERNEL_IDS, STAMP_FACTORS, STAMP_MASK

NUM_COUNTERS = 8  # int64 per worker: one cache line
STAMP, ITERATIONS, SURPLUS, BLOCKS = range(4)
_DECODE = KERNEL_IDS["decode"]
_TILED = KERNEL_IDS["tiled"]
_NONCE_FACTOR, _KERNEL_FACTOR, _RESOLVER_FACTOR = STAMP_FACTORS
_MASK = STAMP_MASK


def scratch_floats(rows: int, head_dim: int) -> int:
    """Return the float32 elements of one worker's scratch, whole cache lines."""
    used = 2 * rows * head_dim + ROWS * KEYS + head_dim * KEYS + head_dim + 2 * rows
    return -(-used // 16) * 16


@inner
def carve(floats: Any, sources: Any, rows: int, head_dim: int) -> Scratch:
    """Divide one worker's memory into its parts."""
    sums = rows * head_dim
    scores = sums + rows * head_dim
    keys = scores + ROWS * KEYS
    zeros = keys + head_dim * KEYS
    states = zeros + head_dim
    return Scratch(
        floats[:sums].reshape((rows, head_dim)),
        floats[sums:scores].reshape((rows, head_dim)),
        floats[scores:keys].reshape((ROWS, KEYS)),
        floats[keys:zeros].reshape((head_dim, KEYS)),
        floats[states : states + 2 * rows].reshape((rows, 2)),
        sources,
        floats[zeros:states],
    )


@inner
def stamp(nonce: int, kernel: int, resolver: int) -> int:
    """Mix the stamp of this launch; the host's twin is ``report.launch_stamp``."""
    return (nonce * _NONCE_FACTOR + kernel * _KERNEL_FACTOR + resolver * _RESOLVER_FACTOR) & _MASK


@inner
def context_of(seq_lens: Any, cu_seqlens_q: Any, sequence: int) -> int:
    """Return the keys that a unit may read of a sequence; none if nothing queries it."""
    if cu_seqlens_q[sequence + 1] > cu_seqlens_q[sequence]:
        return int(seq_lens[sequence])
    return 0


@kernel
def decode(
    nonce: int,
    lookup: Any,
    q: NDArray[np.float32],
    k_pool: NDArray[np.float32],
    v_pool: NDArray[np.float32],
    out: NDArray[np.float32],
    block_tables: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    cu_seqlens_q: NDArray[np.int32],
    sinks: NDArray[np.float32],
    query_scale: np.float32,
    softcap: np.float32,
    window: int,
    floats: NDArray[np.float32],
    sources: NDArray[np.int64],
    counters: NDArray[np.int64],
) -> None:
    """Run one unit per (KV head, query token); heads vary fastest.

    ``counters`` int64 [workers + 1, NUM_COUNTERS] receives what each worker counted; its
    last row holds the queue. ``floats`` and ``sources`` are the workers' scratch.
    """
    workers = len(counters) - 1
    num_kv_heads, head_dim = k_pool.shape[2], k_pool.shape[3]
    units = len(q) * num_kv_heads
    group = q.shape[1] // num_kv_heads
    counters[workers, 0] = 0
    for worker in prange(workers):
        layer = Layer(q, k_pool, v_pool, out, block_tables, sinks, query_scale, softcap, window)
        scratch = carve(floats[worker], sources[worker], group, head_dim)
        iterations, blocks = 0, 0
        unit = take_ticket(counters[workers].ctypes.data)
        while unit < units:
            token, head = unit // num_kv_heads, unit % num_kv_heads
            sequence, steps = find_token(lookup, token)
            iterations += steps
            begin, end = cu_seqlens_q[sequence], cu_seqlens_q[sequence + 1]
            context = context_of(seq_lens, cu_seqlens_q, sequence)
            # Clamped for wrong lookups: they may name any sequence, and must stay inside it.
            high = max(0, min(context, context - (end - begin) + (token - begin) + 1))
            blocks += attend_rows(layer, scratch, Work(sequence, head, token, 1, high))
            unit = take_ticket(counters[workers].ctypes.data)
        counters[worker, STAMP] = stamp(nonce, _DECODE, resolver_id(lookup))
        counters[worker, ITERATIONS] = iterations
        counters[worker, SURPLUS] = 0
        counters[worker, BLOCKS] = blocks


@kernel
def tiled(
    nonce: int,
    lookup: Any,
    q: NDArray[np.float32],
    k_pool: NDArray[np.float32],
    v_pool: NDArray[np.float32],
    out: NDArray[np.float32],
    block_tables: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    cu_seqlens_q: NDArray[np.int32],
    sinks: NDArray[np.float32],
    query_scale: np.float32,
    softcap: np.float32,
    window: int,
    floats: NDArray[np.float32],
    sources: NDArray[np.int64],
    counters: NDArray[np.int64],
) -> None:
    """Run one unit per (KV head, Q-block of ``BQ`` tokens); surplus units exit.

    Arguments as in ``decode``. The grid has ``total_q // BQ + num_seqs`` Q-blocks, an
    upper bound that needs no query length.
    """
    workers = len(counters) - 1
    num_kv_heads, head_dim = k_pool.shape[2], k_pool.shape[3]
    units = (len(q) // BQ + len(seq_lens)) * num_kv_heads
    group = q.shape[1] // num_kv_heads
    counters[workers, 0] = 0
    for worker in prange(workers):
        layer = Layer(q, k_pool, v_pool, out, block_tables, sinks, query_scale, softcap, window)
        scratch = carve(floats[worker], sources[worker], BQ * group, head_dim)
        iterations, surplus, blocks = 0, 0, 0
        unit = take_ticket(counters[workers].ctypes.data)
        while unit < units:
            qblock, head = unit // num_kv_heads, unit % num_kv_heads
            sequence, steps = find_qblock(lookup, qblock)
            iterations += steps
            begin, tokens = 0, 0
            if sequence >= 0:
                begin = int(cu_seqlens_q[sequence])
                length = cu_seqlens_q[sequence + 1] - begin
                start = (qblock - (begin // BQ + sequence)) * BQ
                if 0 <= start < length:
                    tokens = min(BQ, length - start)
            if tokens > 0:
                high = seq_lens[sequence] - length + start + 1
                work = Work(sequence, head, begin + start, tokens, high)
                blocks += attend_rows(layer, scratch, work)
            else:
                surplus += 1
            unit = take_ticket(counters[workers].ctypes.data)
        counters[worker, STAMP] = stamp(nonce, _TILED, resolver_id(lookup))
        counters[worker, ITERATIONS] = iterations
        counters[worker, SURPLUS] = surplus
        counters[worker, BLOCKS] = blocks


@kernel
def scatter(
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    k_pool: NDArray[np.float32],
    v_pool: NDArray[np.float32],
    slot_mapping: NDArray[np.int64],
) -> None:
    """Write the keys and values of new tokens to their slots; a slot of -1 is skipped."""
    block_size = k_pool.shape[1]
    for token in prange(len(slot_mapping)):
        slot = slot_mapping[token]
        if slot >= 0:
            k_pool[slot // block_size, slot % block_size] = k[token]
            v_pool[slot // block_size, slot % block_size] = v[token]
