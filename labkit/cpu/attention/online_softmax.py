"""Online softmax over rows of queries, shared by the decode and the tiled kernel.

For each KV head, a unit of work has one row per pair of query token and query head that it serves,
ordered by token. All these rows share each load of a key or value. Keys are processed in tiles of
``TILE_KEYS``, aligned to position 0 of the sequence, with online softmax in base 2. The result of a
row depends only on its own query and keys: not on the kernel, the batch, the other rows or the
block size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from labkit.cpu.attention.attention_intrinsics import (
    TILE_KEYS,
    clear_row,
    copy_bytes,
    exp2_scalar,
    load_float,
    load_int32,
    pool_row_bytes,
    scale_row,
    softcap_tile,
    softmax_tile,
    store_float,
)
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.runtime.jit import inlined, inner
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import LOG2E

_LOG2E = np.float32(LOG2E)


class Scratch(NamedTuple):
    """The addresses of the parts of a worker's scratch memory, all float32."""

    queries: int  # [rows, head_dim], scaled
    sums: int  # [rows, head_dim], weighted values
    scores: int  # [rows, TILE_KEYS]
    states: int  # [rows, 2], running maximum and sum
    rest: int  # memory for the kernel's own use


def row_bytes(rows: int, head_dim: int) -> int:
    """Return the bytes of scratch memory for ``rows`` rows, rounded up to cache lines."""
    return -(-4 * rows * (2 * head_dim + TILE_KEYS + 2) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


@inner
def divide_scratch(memory: int, rows: int, head_dim: int) -> Scratch:
    """Divide a worker's memory into the parts of a ``Scratch``.

    If ``memory`` starts on a cache line, every part does.
    """
    sums = memory + 4 * rows * head_dim
    scores = sums + 4 * rows * head_dim
    states = scores + 4 * rows * TILE_KEYS
    rest = states + (8 * rows + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES
    return Scratch(memory, sums, scores, states, rest)


@inlined
def head_bytes(params: Any) -> int:
    """Return the bytes of one KV head of one key (or value) in the pools."""
    size: int = pool_row_bytes(params, params.head_dim)
    return size


@inlined
def key_bytes(params: Any) -> int:
    """Return the bytes of all KV heads of a key, which is the stride between keys of a block."""
    size: int = params.num_kv_heads * head_bytes(params)
    return size


@inlined
def key_offset(params: Any, sequence: int, key: int) -> int:
    """Return the offset in a pool of the key at position ``key`` of a sequence (bytes)."""
    table = params.block_tables + 4 * sequence * params.max_blocks
    block = key // params.block_size
    slot = load_int32(table + 4 * block) * params.block_size + key - block * params.block_size
    offset: int = slot * key_bytes(params)
    return offset


@inlined
def run_end(params: Any, key: int, end: int) -> int:
    """Return the end of the contiguous keys from ``key`` on: the end of the block, or ``end``."""
    stop: int = min(end, (key // params.block_size + 1) * params.block_size)
    return stop


@inner
def start_rows(
    params: Any, scratch: Scratch, q_head: int, row: int, token: int, tokens: int
) -> None:
    """Load the scaled queries of one KV head into the rows from ``row`` on, and reset these rows.

    The queries are those of ``params.group`` query heads from ``q_head`` on, of ``tokens`` tokens
    from ``token`` on.
    """
    width = 4 * params.head_dim
    vectors = params.head_dim // LANES
    for i in range(tokens):
        first = (token + i) * params.num_q_heads + q_head
        queries = scratch.queries + (row + i * params.group) * width
        scale_row(queries, params.q + first * width, params.group * vectors, params.query_scale)
    clear_row(scratch.sums + row * width, tokens * params.group * vectors)
    for state in range(row, row + tokens * params.group):
        store_float(scratch.states + 8 * state, np.float32(-np.inf))
        store_float(scratch.states + 8 * state + 4, np.float32(0))


@inner
def softmax_row(params: Any, scratch: Scratch, row: int, low: int, high: int) -> None:
    """Turn a row's scores of a tile into weights, and rescale the row's earlier sums.

    At least one key must be inside ``low`` to ``high`` (exclusive). The caller must not add the
    values of the others; their weights are tiny, but not 0.
    """
    scores = scratch.scores + 4 * TILE_KEYS * row
    if params.softcap > 0:
        softcap_tile(scores, params.softcap)
    shrink = softmax_tile(scores, low, high, scratch.states + 8 * row)
    # Even if the factor is 1: a branch on it would cost more than rescaling the row.
    sums = scratch.sums + 4 * params.head_dim * row
    scale_row(sums, sums, params.head_dim // LANES, shrink)


@inner
def finish_rows(
    params: Any, scratch: Scratch, q_head: int, row: int, token: int, tokens: int
) -> None:
    """Divide the rows that ``start_rows`` started by their softmax sums (including sinks).

    The results are written to the output.
    A row without any key, which only a wrong lookup can cause, becomes zeros.
    """
    width = 4 * params.head_dim
    for i in range(tokens * params.group):
        head = q_head + i % params.group
        largest = load_float(scratch.states + 8 * (row + i))
        total = load_float(scratch.states + 8 * (row + i) + 4)
        factor = np.float32(0)
        if total != 0:
            shrink = np.float32(1)
            if params.sinks != 0:
                sink = load_float(params.sinks + 4 * head) * _LOG2E
                new_largest = max(largest, sink)
                shrink = exp2_scalar(largest - new_largest)
                total = total * shrink + exp2_scalar(sink - new_largest)
            factor = shrink / total
        position = (token + i // params.group) * params.num_q_heads + head
        sums = scratch.sums + width * (row + i)
        scale_row(params.out + width * position, sums, params.head_dim // LANES, factor)


@inner
def store_partial_rows(
    params: Any, scratch: Scratch, q_head: int, row: int, token: int, partition: int
) -> None:
    """Store the sums and softmax states of a token's rows, for ``kernel_entry_points.reduce``.

    The rows are those that ``start_rows`` started for one partition of the keys.
    """
    width = 4 * params.head_dim
    first = token * params.num_q_heads + q_head
    for i in range(params.group):
        part = (first + i) * params.partitions + partition
        copy_bytes(params.partial_sums + width * part, scratch.sums + width * (row + i), width)
        copy_bytes(params.partial_states + 8 * part, scratch.states + 8 * (row + i), 8)
