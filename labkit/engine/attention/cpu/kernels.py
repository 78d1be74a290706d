"""The launches: a grid of units, taken from a queue by one worker per thread.

Units cost differently (contexts are ragged, causal rows grow), so a worker takes the next
one when it is free. What a unit computes does not depend on who takes it. A kernel is
compiled for each type of lookup: it finds out whose unit it has, and leaves the arithmetic
to its body, which is compiled once and called by its address.
"""

from __future__ import annotations

from typing import Any

from numba import prange
from numpy.typing import NDArray

from labkit.engine.attention.cpu.jit import inner, kernel
from labkit.engine.attention.cpu.lookups import find_qblock, find_token, resolver_id
from labkit.engine.attention.cpu.tiles import call_body, copy_bytes, take_ticket
from labkit.engine.attention.metadata import BQ
from labkit.engine.attention.report import KERNEL_IDS, STAMP_FACTORS, STAMP_MASK

NUM_COUNTERS = 8  # int64 per worker: one cache line
STAMP, ITERATIONS, SURPLUS, BLOCKS = range(4)
_DECODE = KERNEL_IDS["decode"]
_TILED = KERNEL_IDS["tiled"]
_NONCE_FACTOR, _KERNEL_FACTOR, _RESOLVER_FACTOR = STAMP_FACTORS
_MASK = STAMP_MASK


@inner
def stamp(nonce: int, kernel_id: int, lookup: int) -> int:
    """Mix the stamp of this launch; the host's twin is ``report.launch_stamp``."""
    mixed = nonce * _NONCE_FACTOR + kernel_id * _KERNEL_FACTOR + lookup * _RESOLVER_FACTOR
    return mixed & _MASK


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
) -> None:
    """Run one unit per (``heads`` KV heads, query token); heads vary fastest.

    Parameters
    ----------
    nonce, lookup
        This launch's number, and how a token finds its sequence.
    body, layer
        Addresses of the kernel's arithmetic and of its ``rows.LAYER``.
    memory
        uint8 [workers, bytes], each worker's scratch.
    heads
        KV heads of a unit, a divisor of ``num_kv_heads``.
    counters
        int64 [workers + 1, NUM_COUNTERS]: what each worker counted, then the queue.
    """
    workers = len(counters) - 1
    columns = num_kv_heads // heads
    units = cu_seqlens_q[-1] * columns
    counters[workers, 0] = 0
    for worker in prange(workers):
        scratch = memory[worker].ctypes.data
        queue = counters[workers].ctypes.data
        iterations, blocks = 0, 0
        unit = take_ticket(queue)
        while unit < units:
            token, head = unit // columns, unit % columns * heads
            sequence, steps = find_token(lookup, token)
            iterations += steps
            begin, end = cu_seqlens_q[sequence], cu_seqlens_q[sequence + 1]
            # Clamped for wrong lookups: they may name any sequence, and must stay inside it.
            context = int(seq_lens[sequence]) if end > begin else 0
            high = max(0, min(context, context - end + token + 1))
            blocks += call_body(body, layer, scratch, sequence, head, heads, token, high)
            unit = take_ticket(queue)
        counters[worker, STAMP] = stamp(nonce, _DECODE, resolver_id(lookup))
        counters[worker, ITERATIONS] = iterations
        counters[worker, SURPLUS] = 0
        counters[worker, BLOCKS] = blocks


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

    Parameters as in ``decode``. The grid has ``total_q // BQ + num_seqs`` Q-blocks, an
    upper bound that needs no query length.
    """
    workers = len(counters) - 1
    units = (cu_seqlens_q[-1] // BQ + len(seq_lens)) * num_kv_heads
    counters[workers, 0] = 0
    for worker in prange(workers):
        scratch = memory[worker].ctypes.data
        queue = counters[workers].ctypes.data
        iterations, surplus, blocks = 0, 0, 0
        unit = take_ticket(queue)
        while unit < units:
            qblock, head = unit // num_kv_heads, unit % num_kv_heads
            sequence, steps = find_qblock(lookup, qblock)
            iterations += steps
            begin, start, length = 0, 0, 0
            if sequence >= 0:
                begin = int(cu_seqlens_q[sequence])
                length = cu_seqlens_q[sequence + 1] - begin
                start = (qblock - (begin // BQ + sequence)) * BQ
            if 0 <= start < length:
                high = seq_lens[sequence] - length + start + 1
                tokens = min(BQ, length - start)
                token = begin + start
                blocks += call_body(body, layer, scratch, sequence, head, token, tokens, high)
            else:
                surplus += 1
            unit = take_ticket(queue)
        counters[worker, STAMP] = stamp(nonce, _TILED, resolver_id(lookup))
        counters[worker, ITERATIONS] = iterations
        counters[worker, SURPLUS] = surplus
        counters[worker, BLOCKS] = blocks


@kernel
def scatter(
    k: int, v: int, k_pool: int, v_pool: int, slot_mapping: NDArray[Any], slot_bytes: int
) -> None:
    """Write the keys and values of new tokens to their slots; a slot of -1 is skipped.

    ``k``, ``v`` and the pools are addresses; a token and a slot hold ``slot_bytes`` of each.
    """
    for token in prange(len(slot_mapping)):
        slot = slot_mapping[token]
        if slot >= 0:
            copy_bytes(k_pool + slot * slot_bytes, k + token * slot_bytes, slot_bytes)
            copy_bytes(v_pool + slot * slot_bytes, v + token * slot_bytes, slot_bytes)
