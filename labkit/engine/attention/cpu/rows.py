"""The arithmetic that decode and tiled share: some query rows against one KV head.

Rows are the query heads of one KV head for consecutive tokens of one sequence,
token-major, so that every load of a key or value serves them all. Keys are walked in
tiles of ``KEYS``, aligned to position 0 of the sequence, with online softmax in base 2.
A row's result depends on nothing but its own query and keys: not on the kernel, the
batch, the rows beside it or the block size.

Addresses and strides are int64 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.cpu.jit import inner
from labkit.engine.attention.cpu.simd import LANES, VECTORS
from labkit.engine.attention.cpu.tiles import (
    KEYS,
    ROWS,
    exp2_scalar,
    scale_row,
    scores_1,
    scores_4,
    softcap_tile,
    softmax_tile,
    transpose_strip,
    values_1,
    values_1_wide,
    values_4,
    values_4_wide,
)

LOG2E = np.float32(1.4426950408889634)
_WIDE = LANES * VECTORS


class Layer(NamedTuple):
    """One layer's operands and options."""

    q: NDArray[np.float32]
    k_pool: NDArray[np.float32]
    v_pool: NDArray[np.float32]
    out: NDArray[np.float32]
    block_tables: NDArray[np.int32]
    sinks: NDArray[np.float32]  # empty: none
    query_scale: np.float32
    softcap: np.float32  # in base 2; 0: off
    window: int


class Scratch(NamedTuple):
    """One worker's memory."""

    queries: NDArray[np.float32]  # [rows, head_dim], scaled
    sums: NDArray[np.float32]  # [rows, head_dim], weighted values
    scores: NDArray[np.float32]  # [ROWS, KEYS]
    keys: NDArray[np.float32]  # [head_dim, KEYS], a tile transposed
    states: NDArray[np.float32]  # [rows, 2], running maximum and sum
    sources: NDArray[np.int64]  # [2, KEYS], addresses of a tile's keys and of the next one's
    zeros: NDArray[np.float32]  # [head_dim]


class Work(NamedTuple):
    """One unit: ``tokens`` query tokens from ``token`` on, for one KV head.

    Token ``i`` of the unit sees the keys before ``first_high + i``.
    """

    sequence: int
    head: int
    token: int
    tokens: int
    first_high: int


@inner
def attend_rows(layer: Layer, scratch: Scratch, work: Work) -> int:
    """Attend from one unit's rows, write their output, return the KV blocks walked."""
    start_rows(layer, scratch, work)
    low = max(0, work.first_high - layer.window)
    high = work.first_high + work.tokens - 1
    if high <= low:
        finish_rows(layer, scratch, work)
        return 0
    side = 0
    locate_keys(layer, scratch, work, side, low, high, low // KEYS)
    for tile in range(low // KEYS, (high - 1) // KEYS + 1):
        locate_keys(layer, scratch, work, 1 - side, low, high, tile + 1)
        pack_keys(scratch, side, low - tile * KEYS, high - tile * KEYS)
        fold_tile(layer, scratch, work, tile * KEYS)
        side = 1 - side
    finish_rows(layer, scratch, work)
    block_size: int = layer.k_pool.shape[1]
    return (high - 1) // block_size - low // block_size + 1


@inner
def start_rows(layer: Layer, scratch: Scratch, work: Work) -> None:
    """Load the scaled queries and clear the running state."""
    head_dim = layer.q.shape[2]
    group = layer.q.shape[1] // layer.k_pool.shape[2]
    for token in range(work.tokens):
        for head in range(group):
            row = token * group + head
            for d in range(head_dim):
                query = layer.q[work.token + token, work.head * group + head, d]
                scratch.queries[row, d] = query * layer.query_scale
                scratch.sums[row, d] = 0
            scratch.states[row, 0] = -np.inf
            scratch.states[row, 1] = 0


@inner
def locate_keys(
    layer: Layer, scratch: Scratch, work: Work, side: int, low: int, high: int, tile: int
) -> None:
    """Write the addresses of a tile's keys; a key out of ``low`` to ``high`` reads zeros."""
    block_size, num_kv_heads, head_dim = layer.k_pool.shape[1:]
    stride = 4 * num_kv_heads * head_dim
    pool = layer.k_pool.ctypes.data + 4 * work.head * head_dim
    zeros = scratch.zeros.ctypes.data
    base = tile * KEYS
    begin = max(base, low)
    end = max(begin, min(base + KEYS, high))
    for i in range(min(begin - base, KEYS)):
        scratch.sources[side, i] = zeros
    key = begin
    while key < end:
        block = key // block_size
        stop = min(end, (block + 1) * block_size)
        slot = int(layer.block_tables[work.sequence, block]) * block_size
        source = pool + (slot + key - block * block_size) * stride
        for i in range(key - base, stop - base):
            scratch.sources[side, i] = source
            source += stride
        key = stop
    for i in range(end - base, KEYS):
        scratch.sources[side, i] = zeros


@inner
def pack_keys(scratch: Scratch, side: int, begin: int, end: int) -> None:
    """Transpose the strips of a tile that hold a key between ``begin`` and ``end``."""
    sources = scratch.sources.ctypes.data
    keys = scratch.keys.ctypes.data
    vectors = scratch.keys.shape[0] // LANES
    for strip in range(max(0, begin) // LANES, (min(end, KEYS) + LANES - 1) // LANES):
        first = strip * LANES
        transpose_strip(
            sources + 8 * (side * KEYS + first),
            keys + 4 * first,
            4 * KEYS,
            vectors,
            sources + 8 * ((1 - side) * KEYS + first),
        )


@inner
def fold_tile(layer: Layer, scratch: Scratch, work: Work, base: int) -> None:
    """Fold the keys from ``base`` to ``base + KEYS`` into every row."""
    group = layer.q.shape[1] // layer.k_pool.shape[2]
    rows = work.tokens * group
    row = 0
    while row < rows:
        count = ROWS if rows - row >= ROWS else 1
        first_high = work.first_high + row // group
        last_high = work.first_high + (row + count - 1) // group
        low = max(0, first_high - layer.window) - base
        if low < KEYS and last_high > base:
            score_rows(scratch, row, count, low, last_high - base)
            for i in range(count):
                if layer.softcap > 0:
                    softcap_tile(scratch.scores.ctypes.data + 4 * KEYS * i, layer.softcap)
            fold_rows(layer, scratch, work, row, count, base)
        row += count


@inner
def score_rows(scratch: Scratch, row: int, count: int, low: int, high: int) -> None:
    """Multiply some rows with the packed keys from ``low`` to ``high``, in whole vectors."""
    head_dim = scratch.queries.shape[1]
    queries = scratch.queries.ctypes.data + 4 * head_dim * row
    first = max(0, low) // _WIDE * _WIDE
    for key in range(first, min(high, KEYS), _WIDE):
        scores = scratch.scores.ctypes.data + 4 * key
        keys = scratch.keys.ctypes.data + 4 * key
        if count == ROWS:
            scores_4(scores, 4 * KEYS, queries, 4 * head_dim, keys, 4 * KEYS, head_dim)
        else:
            scores_1(scores, 4 * KEYS, queries, 4 * head_dim, keys, 4 * KEYS, head_dim)


@inner
def fold_rows(layer: Layer, scratch: Scratch, work: Work, row: int, count: int, base: int) -> None:
    """Turn some rows' scores into weights and add the weighted values of their keys.

    Each row takes exactly the keys that it sees, in ascending order; a row that sees none
    of the tile is left alone.
    """
    group = layer.q.shape[1] // layer.k_pool.shape[2]
    head_dim = layer.q.shape[2]
    common_low, common_high = 0, KEYS
    for i in range(count):
        high = work.first_high + (row + i) // group - base
        low = max(0, high + base - layer.window) - base
        low, high = max(0, low), min(KEYS, high)
        common_low, common_high = max(common_low, low), min(common_high, high)
        if low < high:
            scores = scratch.scores.ctypes.data + 4 * KEYS * i
            states = scratch.states.ctypes.data + 8 * (row + i)
            shrink = softmax_tile(scores, low, high, states)
            if shrink != 1:
                sums = scratch.sums.ctypes.data + 4 * head_dim * (row + i)
                scale_row(sums, sums, head_dim // LANES, shrink)
    together = count == ROWS and common_low < common_high
    for i in range(count):
        high = work.first_high + (row + i) // group - base
        low = max(0, high + base - layer.window) - base
        low, high = max(0, low), min(KEYS, high)
        if together:
            add_values(layer, scratch, work, row, i, 1, base, low, common_low)
        else:
            add_values(layer, scratch, work, row, i, 1, base, low, high)
    if together:
        add_values(layer, scratch, work, row, 0, ROWS, base, common_low, common_high)
        for i in range(count):
            high = min(KEYS, work.first_high + (row + i) // group - base)
            add_values(layer, scratch, work, row, i, 1, base, common_high, high)


@inner
def add_values(
    layer: Layer,
    scratch: Scratch,
    work: Work,
    row: int,
    i: int,
    count: int,
    base: int,
    begin: int,
    end: int,
) -> None:
    """Add weighted values of the keys ``base + begin`` to ``base + end`` to ``count`` rows."""
    block_size, num_kv_heads, head_dim = layer.v_pool.shape[1:]
    stride = 4 * num_kv_heads * head_dim
    sums = scratch.sums.ctypes.data + 4 * head_dim * (row + i)
    weights = scratch.scores.ctypes.data + 4 * KEYS * i
    pool = layer.v_pool.ctypes.data + 4 * work.head * head_dim
    key = base + begin
    while key < base + end:
        block = key // block_size
        stop = min(base + end, (block + 1) * block_size)
        slot = int(layer.block_tables[work.sequence, block]) * block_size
        values = pool + (slot + key - block * block_size) * stride
        weight = weights + 4 * (key - base)
        d = 0
        while d + _WIDE <= head_dim:
            if count == ROWS:
                values_4_wide(
                    sums + 4 * d, 4 * head_dim, weight, 4 * KEYS, values + 4 * d, stride, stop - key
                )
            else:
                values_1_wide(
                    sums + 4 * d, 4 * head_dim, weight, 4 * KEYS, values + 4 * d, stride, stop - key
                )
            d += _WIDE
        while d < head_dim:
            if count == ROWS:
                values_4(
                    sums + 4 * d, 4 * head_dim, weight, 4 * KEYS, values + 4 * d, stride, stop - key
                )
            else:
                values_1(
                    sums + 4 * d, 4 * head_dim, weight, 4 * KEYS, values + 4 * d, stride, stop - key
                )
            d += LANES
        key = stop


@inner
def finish_rows(layer: Layer, scratch: Scratch, work: Work) -> None:
    """Divide by the softmax sums, sinks included, and write the output.

    A row that saw no key (only a wrong lookup makes one) becomes zeros.
    """
    head_dim = layer.q.shape[2]
    group = layer.q.shape[1] // layer.k_pool.shape[2]
    for row in range(work.tokens * group):
        head = work.head * group + row % group
        largest, total = scratch.states[row, 0], scratch.states[row, 1]
        factor = np.float32(0)
        if total != 0:
            shrink = np.float32(1)
            if len(layer.sinks):
                sink = layer.sinks[head] * LOG2E
                top = max(largest, sink)
                shrink = exp2_scalar(largest - top)
                total = total * shrink + exp2_scalar(sink - top)
            factor = shrink / total
        out = layer.out.ctypes.data + 4 * head_dim * (
            (work.token + row // group) * layer.q.shape[1] + head
        )
        sums = scratch.sums.ctypes.data + 4 * head_dim * row
        scale_row(out, sums, head_dim // LANES, factor)
