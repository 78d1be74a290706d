"""The body of the tiled kernel: up to ``BQ`` query tokens against the keys they see.

The limit is arithmetic. A tile of keys and values is packed once and serves all rows of
the unit, register tile by register tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, types

from labkit.cpu.attention_intrinsics import TILE_KEYS, copy_wide, store_int64
from labkit.cpu.jit import inner
from labkit.cpu.kernel_params import PARAMS_DTYPES, params_type
from labkit.cpu.microkernels import (
    PAIR,
    ROWS,
    SCORED,
    WAITING,
    WIDE,
    scores_tile,
    transpose_strip,
    values_row,
    values_row_wide,
    values_rows,
    values_rows_wide,
)
from labkit.cpu.online_softmax import (
    Scratch,
    carve,
    finish_rows,
    head_bytes,
    offset_of,
    row_bytes,
    run_end,
    start_rows,
    stride_of,
    weigh_row,
)
from labkit.cpu.vector_registers import LANES

SCORES = LANES * SCORED  # keys of a tile of scores


class Packed(NamedTuple):
    """A worker's memory for one KV head's keys and values of a tile: addresses (bytes)."""

    keys: int  # float32 [head_dim, KEYS], transposed
    values: int  # float32 [KEYS, head_dim], side by side
    sources: int  # int64 [KEYS], addresses of the keys
    waiting: int  # ``WAITING`` bytes


class Unit(NamedTuple):
    """``tokens`` query tokens from ``token`` on, for one KV head of one sequence.

    Token ``i`` of the unit sees the keys before ``high + i``.
    """

    sequence: int
    head: int
    token: int
    tokens: int
    high: int


@cache
def scratch_bytes(rows: int, head_dim: int) -> int:
    """Return the bytes of a worker's scratch for units of so many rows."""
    return row_bytes(-(-rows // ROWS) * ROWS, head_dim) + TILE_KEYS * (8 * head_dim + 8) + WAITING


@inner
def whole_tiles(rows: int) -> int:
    """Return ``rows`` rounded up to whole register tiles."""
    return (rows + ROWS - 1) // ROWS * ROWS


@inner
def packed(layer: Any, scratch: Scratch) -> Packed:
    """Divide the rest of a worker's memory."""
    values = scratch.rest + 4 * TILE_KEYS * layer.head_dim
    sources = values + 4 * TILE_KEYS * layer.head_dim
    return Packed(scratch.rest, values, sources, sources + 8 * TILE_KEYS)


@inner
def attend(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend, write the output, return the KV blocks walked."""
    start_rows(layer, scratch, unit.head, 0, unit.token, unit.tokens)
    low = max(0, unit.high - layer.window)
    high = unit.high + unit.tokens - 1
    for base in range(low // TILE_KEYS * TILE_KEYS, high, TILE_KEYS):
        begin, end = max(base, low), min(base + TILE_KEYS, high)
        pack_keys(layer, scratch, unit, base, begin, end)
        pack_values(layer, scratch, unit, base, begin, end)
        rows = unit.tokens * layer.group
        # All rows with the keys, then with the values: either fits the first-level cache.
        for row in range(0, rows, ROWS):
            weigh_rows(layer, scratch, unit, row, min(ROWS, rows - row), base)
        for row in range(0, rows, ROWS):
            add_rows(layer, scratch, unit, row, min(ROWS, rows - row), base)
    finish_rows(layer, scratch, unit.head, 0, unit.token, unit.tokens)
    blocks: int = (high - 1) // layer.block_size - low // layer.block_size + 1
    return blocks


@inner
def attend_masked(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend without skipping: keys before the window are packed and scored, for nothing."""
    start_rows(layer, scratch, unit.head, 0, unit.token, unit.tokens)
    low = max(0, unit.high - layer.window)
    rows = unit.tokens * layer.group
    for base in range(0, low, TILE_KEYS):
        end = min(base + TILE_KEYS, low)
        pack_keys(layer, scratch, unit, base, base, end)
        pack_values(layer, scratch, unit, base, base, end)
        for row in range(0, rows, ROWS):
            count = min(ROWS, rows - row)
            score_rows(layer, scratch, row, count, 0, end - base)
    blocks: int = attend(layer, scratch, unit) + low // layer.block_size
    return blocks


@inner
def pack_keys(layer: Any, scratch: Scratch, unit: Unit, base: int, begin: int, end: int) -> None:
    """Transpose one KV head's keys from ``begin`` to ``end`` to their columns of a tile.

    Columns of the first and last strip that are out of the range repeat the first key;
    what they score is masked.
    """
    tile, size = packed(layer, scratch), head_bytes(layer)
    first = (begin - base) // LANES * LANES
    last = (end - base + LANES - 1) // LANES * LANES
    source = layer.k_pool + offset_of(layer, unit.sequence, begin) + unit.head * size
    for i in range(first, last):
        store_int64(tile.sources + 8 * i, source)
    key = begin
    while key < end:
        stop = run_end(layer, key, end)
        source = layer.k_pool + offset_of(layer, unit.sequence, key) + unit.head * size
        for i in range(key - base, stop - base):
            store_int64(tile.sources + 8 * i, source)
            source += stride_of(layer)
        key = stop
    vectors = layer.head_dim // LANES
    for i in range(first, last, LANES):
        transpose_strip(layer, tile.sources + 8 * i, tile.keys + 4 * i, 4 * TILE_KEYS, vectors)


@inner
def pack_values(layer: Any, scratch: Scratch, unit: Unit, base: int, begin: int, end: int) -> None:
    """Copy one KV head's values from ``begin`` to ``end`` side by side."""
    target, size = packed(layer, scratch).values, head_bytes(layer)
    width, vectors = 4 * layer.head_dim, layer.head_dim // LANES
    key = begin
    while key < end:
        stop = run_end(layer, key, end)
        source = layer.v_pool + offset_of(layer, unit.sequence, key) + unit.head * size
        for i in range(key - base, stop - base):
            copy_wide(layer, target + width * i, source, vectors)
            source += stride_of(layer)
        key = stop


@inner
def score_rows(layer: Any, scratch: Scratch, row: int, count: int, low: int, high: int) -> None:
    """Multiply up to ``ROWS`` rows with the tile's keys from ``low`` to ``high``."""
    width, pitch, steps = 4 * layer.head_dim, 4 * TILE_KEYS, layer.head_dim // LANES
    tile = packed(layer, scratch)
    for key in range(low // SCORES * SCORES, high, SCORES):
        keys = tile.keys + 4 * key
        for i in range(row, row + count, PAIR):
            scores, queries = scratch.scores + pitch * i + 4 * key, scratch.queries + width * i
            scores_tile(scores, pitch, queries, width, keys, pitch, steps, tile.waiting)


@inner
def seen(layer: Any, unit: Unit, row: int, base: int) -> tuple[int, int]:
    """Return the keys, counted from ``base``, that a row sees of a tile."""
    high = unit.high + row // layer.group
    return max(0, max(0, high - layer.window) - base), min(TILE_KEYS, high - base)


@inner
def weigh_rows(layer: Any, scratch: Scratch, unit: Unit, row: int, count: int, base: int) -> None:
    """Turn what up to ``ROWS`` rows see of the packed tile into weights, if anything."""
    low, _ = seen(layer, unit, row, base)
    _, high = seen(layer, unit, row + count - 1, base)
    if low < high:
        score_rows(layer, scratch, row, count, low, high)
        for i in range(row, row + count):
            low, high = seen(layer, unit, i, base)
            if low < high:
                weigh_row(layer, scratch, i, low, high)


@inner
def add_rows(layer: Any, scratch: Scratch, unit: Unit, row: int, count: int, base: int) -> None:
    """Add the weighted values of the packed tile to up to ``ROWS`` rows.

    Each row takes exactly the keys that it sees, in ascending order: those that all rows
    see go through one register tile. A row that sees none of the tile is left alone.
    """
    low, first_high = seen(layer, unit, row, base)
    last_low, high = seen(layer, unit, row + count - 1, base)
    if low == last_low and first_high == high:
        add_packed(layer, scratch, row, count, low, high)
        return
    common_low, common_high = last_low, max(last_low, first_high)
    for i in range(row, row + count):
        low, high = seen(layer, unit, i, base)
        add_packed(layer, scratch, i, 1, low, min(high, common_low))
    add_packed(layer, scratch, row, count, common_low, common_high)
    for i in range(row, row + count):
        low, high = seen(layer, unit, i, base)
        add_packed(layer, scratch, i, 1, max(low, common_high), high)


@inner
def add_packed(layer: Any, scratch: Scratch, row: int, count: int, begin: int, end: int) -> None:
    """Add the tile's weighted values from ``begin`` to ``end``, if any, to some rows."""
    if begin >= end:
        return
    width, pitch, keys = 4 * layer.head_dim, 4 * TILE_KEYS, end - begin
    sums = scratch.sums + width * row
    weights = scratch.scores + pitch * row + 4 * begin
    values = packed(layer, scratch).values + width * begin
    column = 0
    while column + 4 * WIDE <= width:
        target, source = sums + column, values + column
        if count > 1:
            values_rows_wide(target, width, weights, pitch, source, width, keys)
        else:
            values_row_wide(target, width, weights, pitch, source, width, keys)
        column += 4 * WIDE
    while column < width:
        target, source = sums + column, values + column
        if count > 1:
            values_rows(target, width, weights, pitch, source, width, keys)
        else:
            values_row(target, width, weights, pitch, source, width, keys)
        column += 4 * LANES


@cache
def body(stored: np.dtype[Any], window_skip: bool = True) -> int:
    """Return the address of the body in C's calling convention, compiled or from cache.

    ``stored``: the pools' dtype. ``window_skip``: whether keys before the window are left out.

    int64 (layer: of arguments.LAYERS *, memory, sequence, head, token, tokens, high) returns the
    KV blocks walked; ``memory`` is the address of the worker's ``scratch_bytes``.
    """
    signature = types.int64(types.CPointer(params_type(PARAMS_DTYPES[stored])), *[types.int64] * 6)
    kind = _tiled if window_skip else _masked
    compiled = cfunc(signature, cache=True, error_model="numpy")(kind)
    return int(compiled.address)


def _tiled(
    layers: Any, memory: int, sequence: int, head: int, token: int, tokens: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    scratch = carve(memory, whole_tiles(tokens * layer.group), layer.head_dim)
    return attend(layer, scratch, Unit(sequence, head, token, tokens, high))


def _masked(
    layers: Any, memory: int, sequence: int, head: int, token: int, tokens: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    scratch = carve(memory, whole_tiles(tokens * layer.group), layer.head_dim)
    return attend_masked(layer, scratch, Unit(sequence, head, token, tokens, high))
