"""The launches: a grid of units, taken from a queue by one worker per thread.

Units cost differently (contexts are ragged, causal rows grow), so a worker takes the next
one when it is free. What a unit computes does not depend on who takes it. A kernel is
compiled for each type of lookup: it finds out whose unit it has, and leaves the arithmetic
to its body, which is compiled once and called by its address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from labkit.cpu.attention_intrinsics import (
    call_body,
    copy_bytes,
    exp2_scalar,
    round_to_bfloat16,
    round_to_float16,
    take_ticket,
)
from labkit.cpu.jit import inner, kernel
from labkit.cpu.kernel_params import PARAMS_BYTES
from labkit.cpu.kv_dtypes import NUMPY_DTYPES
from labkit.cpu.resolver_variants import (
    find_qblock,
    find_token,
    qblock_units,
    resolver_id,
    token_units,
)
from labkit.cpu.vector_registers import LANES
from labkit.kernel_abi import (
    BLOCKS_COLUMN,
    BQ,
    ITERATIONS_COLUMN,
    KERNEL_IDS,
    STAMP_COLUMN,
    STAMP_FACTORS,
    STAMP_MASK,
    SURPLUS_COLUMN,
)

COUNTER_COLUMNS = 8  # int64 per worker: one cache line
_DECODE = KERNEL_IDS["decode"]
_TILED = KERNEL_IDS["tiled"]
_REDUCE = KERNEL_IDS["reduce"]
_LAYER_BYTES = PARAMS_BYTES
_NONCE_FACTOR, _KERNEL_FACTOR, _RESOLVER_FACTOR = STAMP_FACTORS
_MASK = STAMP_MASK
POOL_DTYPES = tuple(NUMPY_DTYPES.values())
_FLOAT32, _FLOAT16, _BFLOAT16 = range(len(POOL_DTYPES))


@inner
def stamp(nonce: int, kernel_id: int, lookup: int) -> int:
    """Mix the stamp of this launch; the host's twin is ``report.launch_stamp``."""
    mixed = nonce * _NONCE_FACTOR + kernel_id * _KERNEL_FACTOR + lookup * _RESOLVER_FACTOR
    return mixed & _MASK


@inner
def run_decode_units(
    worker: int,
    nonce: int,
    lookup: Any,
    body: int,
    layer: int,
    memory: NDArray[Any],
    counters: NDArray[Any],
    cu_seqlens_q: NDArray[Any],
    seq_lens: NDArray[Any],
    num_kv_heads: int,
    heads: int,
    splits: int,
) -> None:
    """Be one worker of ``decode``: take units until there are none, and leave the counts."""
    columns = num_kv_heads // heads * splits
    units = token_units(lookup, cu_seqlens_q) * columns
    scratch = memory[worker].ctypes.data
    queue = counters[len(counters) - 1].ctypes.data
    iterations, surplus, blocks = 0, 0, 0
    unit = take_ticket(queue)
    while unit < units:
        column = unit % columns
        sequence, token, steps = find_token(lookup, unit // columns, cu_seqlens_q)
        iterations += steps
        if sequence >= 0:
            begin, end = cu_seqlens_q[sequence], cu_seqlens_q[sequence + 1]
            # Clamped for wrong lookups: they may name any sequence, and must stay inside.
            context = int(seq_lens[sequence]) if end > begin else 0
            high = max(0, min(context, context - end + token + 1))
            head, mine = column // splits * heads, layer + column % splits * _LAYER_BYTES
            blocks += call_body(body, mine, scratch, sequence, head, heads, token, high)
        else:
            surplus += 1
        unit = take_ticket(queue)
    counters[worker, STAMP_COLUMN] = stamp(nonce, _DECODE, resolver_id(lookup)) + worker
    counters[worker, ITERATIONS_COLUMN] = iterations
    counters[worker, SURPLUS_COLUMN] = surplus
    counters[worker, BLOCKS_COLUMN] = blocks


@kernel
def decode(
    nonce: int,
    lookup: Any,
    body: int,
    layer: int,
    memory: NDArray[Any],
    counters: NDArray[Any],
    cu_seqlens_q: NDArray[Any],
    seq_lens: NDArray[Any],
    num_kv_heads: int,
    heads: int,
    splits: int,
) -> None:
    """Run ``splits`` units per (``heads`` KV heads, query token); heads vary fastest.

    Parameters
    ----------
    nonce, lookup
        This launch's number, and how a token finds its sequence.
    body, layer
        Addresses of the kernel's arithmetic and of its layers (``arguments``), one per split.
    memory
        uint8 [workers, bytes], each worker's scratch.
    heads
        KV heads of a unit, a divisor of ``num_kv_heads``.
    splits
        Units that share one token's work on these heads, each with a layer of its own: by
        query head, by partition of the keys, or both.
    counters
        int64 [workers + 1, NUM_COUNTERS]: what each worker counted, then the queue.
    """
    workers = len(counters) - 1
    counters[workers, 0] = 0
    for worker in prange(workers):
        run_decode_units(
            worker, nonce, lookup, body, layer, memory, counters, cu_seqlens_q, seq_lens,
            num_kv_heads, heads, splits,
        )  # fmt: skip


@kernel
def tiled(
    nonce: int,
    lookup: Any,
    body: int,
    layer: int,
    memory: NDArray[Any],
    counters: NDArray[Any],
    cu_seqlens_q: NDArray[Any],
    seq_lens: NDArray[Any],
    num_kv_heads: int,
) -> None:
    """Run one unit per (KV head, Q-block of ``BQ`` tokens); surplus units exit.

    Parameters as in ``decode``. The packed grid has ``total_q // BQ + num_seqs`` Q-blocks,
    an upper bound that needs no query length.
    """
    workers = len(counters) - 1
    units = qblock_units(lookup, cu_seqlens_q) * num_kv_heads
    counters[workers, 0] = 0
    for worker in prange(workers):
        scratch = memory[worker].ctypes.data
        queue = counters[workers].ctypes.data
        iterations, surplus, blocks = 0, 0, 0
        unit = take_ticket(queue)
        while unit < units:
            head = unit % num_kv_heads
            sequence, start, steps = find_qblock(lookup, unit // num_kv_heads, cu_seqlens_q)
            iterations += steps
            begin, length = 0, 0
            if sequence >= 0:
                begin = int(cu_seqlens_q[sequence])
                length = cu_seqlens_q[sequence + 1] - begin
            if 0 <= start < length:
                high = seq_lens[sequence] - length + start + 1
                tokens = min(BQ, length - start)
                token = begin + start
                blocks += call_body(body, layer, scratch, sequence, head, token, tokens, high)
            else:
                surplus += 1
            unit = take_ticket(queue)
        counters[worker, STAMP_COLUMN] = stamp(nonce, _TILED, resolver_id(lookup)) + worker
        counters[worker, ITERATIONS_COLUMN] = iterations
        counters[worker, SURPLUS_COLUMN] = surplus
        counters[worker, BLOCKS_COLUMN] = blocks


@kernel
def reduce(
    nonce: int,
    resolver: int,
    sums: NDArray[Any],
    states: NDArray[Any],
    sinks: NDArray[Any],
    out: NDArray[Any],
    counters: NDArray[Any],
) -> None:
    """Merge the partitions of every query token and head: split-KV's second step.

    Parameters
    ----------
    nonce, resolver, counters
        As in ``decode``; ``resolver`` is its number.
    sums, states
        float32 [tokens, heads, partitions, head_dim] and [..., 2]: weighted values,
        running maximum (base 2) and softmax sum of each partition.
    sinks
        float32 [heads], in base 2, or [0]: none. They count once per query, so here.
    out
        float32 [tokens, heads, head_dim].
    """
    workers = len(counters) - 1
    tokens, heads, partitions, head_dim = sums.shape
    for worker in prange(workers):
        for row in range(worker, tokens * heads, workers):
            token, head = row // heads, row % heads
            top = states[token, head, :, 0].max()
            if len(sinks):
                top = max(top, sinks[head])
            total = exp2_scalar(sinks[head] - top) if len(sinks) else np.float32(0)
            merged = out[token, head]
            merged[:] = 0
            for p in range(partitions):
                weight = states[token, head, p, 1]
                if weight != 0:
                    factor = exp2_scalar(states[token, head, p, 0] - top)
                    total += weight * factor
                    part = sums[token, head, p]
                    for d in range(head_dim):
                        merged[d] += factor * part[d]
            if total != 0:
                for d in range(head_dim):
                    merged[d] /= total
        counters[worker, STAMP_COLUMN] = stamp(nonce, _REDUCE, resolver) + worker


@kernel
def scatter(
    element: int,
    k: int,
    v: int,
    k_pool: int,
    v_pool: int,
    slot_mapping: NDArray[Any],
    numbers: int,
) -> None:
    """Write the keys and values of new tokens to their slots; a slot of -1 is skipped.

    Parameters
    ----------
    element
        What the pools hold: the index of its type in ``POOL_DTYPES``.
    k, v
        Addresses of the new keys and values, float32.
    k_pool, v_pool
        Addresses of the pools.
    slot_mapping
        int64 [tokens].
    numbers
        How many a token and a slot hold of each, whole vectors.
    """
    for token in prange(len(slot_mapping)):
        write_token_kv(token, element, k, v, k_pool, v_pool, slot_mapping, numbers)


@inner
def write_token_kv(
    token: int,
    element: int,
    k: int,
    v: int,
    k_pool: int,
    v_pool: int,
    slot_mapping: NDArray[Any],
    numbers: int,
) -> None:
    """Write one token's key and value."""
    slot = slot_mapping[token]
    if slot >= 0:
        begin, end = token * numbers, slot * numbers
        write_row(element, k_pool, end, k + 4 * begin, numbers)
        write_row(element, v_pool, end, v + 4 * begin, numbers)


@inner
def write_row(element: int, pool: int, first: int, source: int, numbers: int) -> None:
    """Write so many float32 to a pool from its number ``first`` on, rounded to its type."""
    if element == _FLOAT32:
        copy_bytes(pool + 4 * first, source, 4 * numbers)
    elif element == _FLOAT16:
        round_to_float16(pool + 2 * first, source, numbers // LANES)
    else:
        round_to_bfloat16(pool + 2 * first, source, numbers // LANES)
