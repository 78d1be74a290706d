"""The arithmetic that decode and tiled share: some query rows against one KV head.

Rows are the query heads of one KV head for consecutive tokens of one sequence,
token-major, so that every load of a key or value serves them all. Keys are walked in
tiles of ``KEYS``, aligned to position 0 of the sequence, with online softmax in base 2.
A row's result depends on nothing but its own query and keys: not on the kernel, the
batch, the rows beside it or the block size.

``attend_rows`` is compiled once, to C's calling convention; the kernels, of which there
is one per type of lookup, call it by its address.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, from_dtype, types

from labkit.engine.attention import validate
from labkit.engine.attention.cpu.jit import inner
from labkit.engine.attention.cpu.simd import LANES
from labkit.engine.attention.cpu.tiles import (
    KEYS,
    ROWS,
    WIDE,
    clear,
    copy_row,
    exp2_scalar,
    load_float,
    load_int32,
    load_int64,
    scale_row,
    scores_1,
    scores_4,
    softcap_tile,
    softmax_tile,
    store_float,
    store_int64,
    transpose_strip,
    values_1,
    values_1_wide,
    values_4,
    values_4_wide,
)

MAX_HEAD_DIM = validate.MAX_HEAD_DIM
LOG2E = np.float32(1.4426950408889634)

# One layer's operands and options; arrays by address (bytes), contiguous.
LAYER = np.dtype(
    [
        ("q", np.int64),  # float32 [total_q, num_q_heads, head_dim]
        ("k_pool", np.int64),  # float32 [num_blocks, block_size, num_kv_heads, head_dim]
        ("v_pool", np.int64),
        ("out", np.int64),  # as q
        ("sinks", np.int64),  # float32 [num_q_heads], or 0: none
        ("block_tables", np.int64),  # int32 [num_seqs, max_blocks]
        ("max_blocks", np.int64),
        ("num_q_heads", np.int64),
        ("num_kv_heads", np.int64),
        ("head_dim", np.int64),
        ("block_size", np.int64),
        ("window", np.int64),
        ("query_scale", np.float32),
        ("softcap", np.float32),  # in base 2; 0: off
    ]
)


class Unit(NamedTuple):
    """``tokens`` query tokens from ``token`` on, for one KV head of one sequence.

    Token ``i`` of the unit sees the keys before ``high + i``.
    """

    sequence: int
    head: int
    token: int
    tokens: int
    high: int


class Scratch(NamedTuple):
    """One worker's memory: addresses (bytes) of its parts, all but the last float32."""

    queries: int  # [rows, head_dim], scaled
    sums: int  # [rows, head_dim], weighted values
    scores: int  # [ROWS, KEYS]
    keys: int  # [head_dim, KEYS], a tile transposed
    values: int  # [KEYS, head_dim]
    zeros: int  # [MAX_HEAD_DIM]
    states: int  # [rows, 2], running maximum and sum
    sources: int  # int64 [2, KEYS], addresses of a tile's keys and of the next one's


def scratch_bytes(rows: int, head_dim: int) -> int:
    """Return the bytes of one worker's scratch, whole cache lines."""
    rows = -(-rows // ROWS) * ROWS
    floats = (2 * rows + 2 * KEYS) * head_dim + ROWS * KEYS + 2 * rows + MAX_HEAD_DIM
    return -(-(4 * floats + 16 * KEYS) // 64) * 64


@inner
def carve(memory: int, rows: int, head_dim: int) -> Scratch:
    """Divide a worker's memory; the zeros lie first, so that nothing else ever lies there."""
    rows = (rows + ROWS - 1) // ROWS * ROWS
    sources = memory + 4 * MAX_HEAD_DIM
    queries = sources + 16 * KEYS
    sums = queries + 4 * rows * head_dim
    scores = sums + 4 * rows * head_dim
    keys = scores + 4 * ROWS * KEYS
    values = keys + 4 * head_dim * KEYS
    states = values + 4 * head_dim * KEYS
    return Scratch(queries, sums, scores, keys, values, memory, states, sources)


@inner
def attend(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend from one unit's rows, write their output, return the KV blocks walked."""
    start_rows(layer, scratch, unit)
    low = max(0, unit.high - layer.window)
    high = unit.high + unit.tokens - 1
    if high <= low:
        finish_rows(layer, scratch, unit)
        return 0
    side = 0
    locate_keys(layer, scratch, unit, side, low, high, low // KEYS)
    for tile in range(low // KEYS, (high - 1) // KEYS + 1):
        locate_keys(layer, scratch, unit, 1 - side, low, high, tile + 1)
        pack_tile(layer, scratch, side, low - tile * KEYS, high - tile * KEYS)
        fold_tile(layer, scratch, unit, tile * KEYS)
        side = 1 - side
    finish_rows(layer, scratch, unit)
    blocks: int = (high - 1) // layer.block_size - low // layer.block_size + 1
    return blocks


@inner
def start_rows(layer: Any, scratch: Scratch, unit: Unit) -> None:
    """Load the scaled queries and clear the running state."""
    group = layer.num_q_heads // layer.num_kv_heads
    row_bytes = 4 * layer.head_dim
    vectors = layer.head_dim // LANES
    for token in range(unit.tokens):
        first = (unit.token + token) * layer.num_q_heads + unit.head * group
        queries = scratch.queries + token * group * row_bytes
        source = layer.q + first * row_bytes
        scale_row(queries, source, group * vectors, layer.query_scale)
    rows = unit.tokens * group
    clear(scratch.sums, rows * vectors)
    for row in range(rows):
        store_float(scratch.states + 8 * row, np.float32(-np.inf))
        store_float(scratch.states + 8 * row + 4, np.float32(0))


@inner
def locate_keys(
    layer: Any, scratch: Scratch, unit: Unit, side: int, low: int, high: int, tile: int
) -> None:
    """Write the addresses of a tile's keys; a key out of ``low`` to ``high`` reads zeros."""
    stride = 4 * layer.num_kv_heads * layer.head_dim
    pool = layer.k_pool + 4 * unit.head * layer.head_dim
    table = layer.block_tables + 4 * unit.sequence * layer.max_blocks
    sources = scratch.sources + 8 * KEYS * side
    base = tile * KEYS
    begin = max(base, low)
    end = max(begin, min(base + KEYS, high))
    for i in range(min(begin - base, KEYS)):
        store_int64(sources + 8 * i, scratch.zeros)
    key = begin
    while key < end:
        block = key // layer.block_size
        first = block * layer.block_size
        stop = min(end, first + layer.block_size)
        slot = load_int32(table + 4 * block) * layer.block_size + key - first
        source = pool + slot * stride
        for i in range(key - base, stop - base):
            store_int64(sources + 8 * i, source)
            source += stride
        key = stop
    for i in range(end - base, KEYS):
        store_int64(sources + 8 * i, scratch.zeros)


@inner
def pack_tile(layer: Any, scratch: Scratch, side: int, begin: int, end: int) -> None:
    """Transpose a tile's keys from ``begin`` to ``end`` and copy its values.

    The next tile's rows are prefetched on the way.
    """
    here = scratch.sources + 8 * KEYS * side
    ahead = scratch.sources + 8 * KEYS * (1 - side)
    vectors = layer.head_dim // LANES
    begin, end = max(0, begin), min(end, KEYS)
    for strip in range(begin // LANES, (end + LANES - 1) // LANES):
        first = strip * LANES
        keys = scratch.keys + 4 * first
        transpose_strip(here + 8 * first, keys, 4 * KEYS, vectors, ahead + 8 * first)
    to_values = layer.v_pool - layer.k_pool
    for i in range(begin, end):
        source = load_int64(here + 8 * i) + to_values
        following = load_int64(ahead + 8 * i) + to_values
        copy_row(scratch.values + 4 * layer.head_dim * i, source, vectors, following)


@inner
def seen(layer: Any, unit: Unit, row: int, base: int) -> tuple[int, int]:
    """Return the keys, counted from ``base``, that a row sees of a tile."""
    high = unit.high + row // (layer.num_q_heads // layer.num_kv_heads)
    return max(0, max(0, high - layer.window) - base), min(KEYS, high - base)


@inner
def fold_tile(layer: Any, scratch: Scratch, unit: Unit, base: int) -> None:
    """Fold the keys from ``base`` to ``base + KEYS`` into every row."""
    rows = unit.tokens * (layer.num_q_heads // layer.num_kv_heads)
    for row in range(0, rows, ROWS):
        count = min(ROWS, rows - row)
        low, _ = seen(layer, unit, row, base)
        _, high = seen(layer, unit, row + count - 1, base)
        if low < high:
            score_rows(layer, scratch, row, count, low, high)
            fold_rows(layer, scratch, unit, row, count, base)


@inner
def score_rows(layer: Any, scratch: Scratch, row: int, count: int, low: int, high: int) -> None:
    """Multiply up to ``ROWS`` rows with the packed keys from ``low`` to ``high``."""
    width = 4 * layer.head_dim
    queries = scratch.queries + width * row
    for key in range(low // WIDE * WIDE, high, WIDE):
        scores = scratch.scores + 4 * key
        keys = scratch.keys + 4 * key
        if count > 1:
            scores_4(scores, 4 * KEYS, queries, width, keys, 4 * KEYS, layer.head_dim)
        else:
            scores_1(scores, 4 * KEYS, queries, width, keys, 4 * KEYS, layer.head_dim)
    if layer.softcap > 0:
        for i in range(count):
            softcap_tile(scratch.scores + 4 * KEYS * i, layer.softcap)


@inner
def fold_rows(layer: Any, scratch: Scratch, unit: Unit, row: int, count: int, base: int) -> None:
    """Turn up to ``ROWS`` rows' scores into weights and add their weighted values.

    Each row takes exactly the keys that it sees, in ascending order: those that all rows
    see go through one register tile. A row that sees none of the tile is left alone.
    """
    common_low, common_high = 0, KEYS
    for i in range(count):
        low, high = seen(layer, unit, row + i, base)
        common_low, common_high = max(common_low, low), min(common_high, high)
        if low < high:
            states = scratch.states + 8 * (row + i)
            shrink = softmax_tile(scratch.scores + 4 * KEYS * i, low, high, states)
            if shrink != 1:
                sums = scratch.sums + 4 * layer.head_dim * (row + i)
                scale_row(sums, sums, layer.head_dim // LANES, shrink)
    if common_low >= common_high:
        common_low, common_high = KEYS, KEYS
    for i in range(count):
        low, high = seen(layer, unit, row + i, base)
        add_values(layer, scratch, row + i, i, 1, low, min(high, common_low))
    add_values(layer, scratch, row, 0, count, common_low, common_high)
    for i in range(count):
        _, high = seen(layer, unit, row + i, base)
        add_values(layer, scratch, row + i, i, 1, common_high, high)


@inner
def add_values(
    layer: Any, scratch: Scratch, row: int, i: int, count: int, begin: int, end: int
) -> None:
    """Add the weighted values from ``begin`` to ``end`` to ``count`` rows from ``row`` on.

    ``i`` is the place of the first row's weights among the scores.
    """
    if begin >= end:
        return
    width = 4 * layer.head_dim
    sums = scratch.sums + width * row
    weights = scratch.scores + 4 * KEYS * i + 4 * begin
    values = scratch.values + width * begin
    column = 0
    while column + 4 * WIDE <= width:
        if count > 1:
            values_4_wide(
                sums + column, width, weights, 4 * KEYS, values + column, width, end - begin
            )
        else:
            values_1_wide(
                sums + column, width, weights, 4 * KEYS, values + column, width, end - begin
            )
        column += 4 * WIDE
    while column < width:
        if count > 1:
            values_4(sums + column, width, weights, 4 * KEYS, values + column, width, end - begin)
        else:
            values_1(sums + column, width, weights, 4 * KEYS, values + column, width, end - begin)
        column += 4 * LANES


@inner
def finish_rows(layer: Any, scratch: Scratch, unit: Unit) -> None:
    """Divide by the softmax sums, sinks included, and write the output.

    A row that saw no key (only a wrong lookup makes one) becomes zeros.
    """
    group = layer.num_q_heads // layer.num_kv_heads
    for row in range(unit.tokens * group):
        head = unit.head * group + row % group
        largest = load_float(scratch.states + 8 * row)
        total = load_float(scratch.states + 8 * row + 4)
        factor = np.float32(0)
        if total != 0:
            shrink = np.float32(1)
            if layer.sinks != 0:
                sink = load_float(layer.sinks + 4 * head) * LOG2E
                top = max(largest, sink)
                shrink = exp2_scalar(largest - top)
                total = total * shrink + exp2_scalar(sink - top)
            factor = shrink / total
        position = (unit.token + row // group) * layer.num_q_heads + head
        out = layer.out + 4 * layer.head_dim * position
        sums = scratch.sums + 4 * layer.head_dim * row
        scale_row(out, sums, layer.head_dim // LANES, factor)


@cache
def attend_rows() -> int:
    """Return the address of ``attend`` in C's calling convention, compiled or from cache.

    int64 (layer: LAYER *, memory, sequence, head, token, tokens, high); ``memory`` is the
    address of the worker's ``scratch_bytes``, zeros before its first use.
    """
    layers = types.CPointer(from_dtype(LAYER))
    signature = types.int64(layers, *[types.int64] * 6)
    compiled = cfunc(signature, cache=True, error_model="numpy")(_attend_rows)
    return int(compiled.address)


def _attend_rows(
    layers: Any, memory: int, sequence: int, head: int, token: int, tokens: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    group = layer.num_q_heads // layer.num_kv_heads
    scratch = carve(memory, tokens * group, layer.head_dim)
    return attend(layer, scratch, Unit(sequence, head, token, tokens, high))
