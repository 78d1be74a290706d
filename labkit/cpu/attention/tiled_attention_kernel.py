"""The arithmetic of the tiled kernel: up to ``BQ`` query tokens against the keys that they see.

The kernel is limited by arithmetic. Each tile of keys and values is packed once for all rows of the
unit and then multiplied in register tiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from labkit.cpu.attention.attention_intrinsics import TILE_KEYS, copy_widened, store_int64
from labkit.cpu.attention.attention_params import compile_body
from labkit.cpu.attention.online_softmax import (
    Scratch,
    divide_scratch,
    finish_rows,
    head_bytes,
    key_bytes,
    key_offset,
    row_bytes,
    run_end,
    softmax_row,
    start_rows,
)
from labkit.cpu.matmul.microkernels import (
    SCORE_ROWS,
    SCORE_VECTORS,
    SPILL_BYTES,
    TILE_ROWS,
    WIDE_COLUMNS,
    add_weighted_row,
    add_weighted_row_wide,
    add_weighted_tile,
    add_weighted_tile_wide,
    scores_tile,
    transpose_strip,
)
from labkit.cpu.runtime.jit import inner
from labkit.cpu.simd.register_tile_sizes import LANES

SCORE_KEYS = LANES * SCORE_VECTORS  # keys in a register tile of scores


class PackedTile(NamedTuple):
    """The addresses of one KV head's packed keys and values of a tile, in a worker's scratch."""

    keys: int  # float32 [head_dim, TILE_KEYS], transposed by ``transpose_strip``
    values: int  # float32 [TILE_KEYS, head_dim]
    key_addresses: int  # int64 [TILE_KEYS]: the addresses of the keys in the pool
    spill: int  # ``SPILL_BYTES`` for ``scores_tile``


class TiledUnit(NamedTuple):
    """``tokens`` query tokens of one sequence from ``token`` on, and query heads of one KV head.

    The heads are ``params.group`` from ``q_head`` on, of KV head ``head``. Token ``i`` of the unit
    sees the keys before ``high + i``. A unit of the grid that serves several KV heads is computed
    as one ``TiledUnit`` after another.
    """

    sequence: int
    q_head: int
    head: int
    token: int
    tokens: int
    high: int


@cache
def scratch_bytes(rows: int, head_dim: int) -> int:
    """Return the bytes of scratch memory that a worker needs for units of ``rows`` rows."""
    return (
        row_bytes(-(-rows // TILE_ROWS) * TILE_ROWS, head_dim)
        + TILE_KEYS * (8 * head_dim + 8)
        + SPILL_BYTES
    )


@inner
def padded_rows(rows: int) -> int:
    """Return ``rows`` rounded up to a multiple of ``TILE_ROWS``."""
    return (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


@inner
def packed_tile(params: Any, scratch: Scratch) -> PackedTile:
    """Return the addresses of the packed keys and values, which lie in ``scratch.rest``."""
    values = scratch.rest + 4 * TILE_KEYS * params.head_dim
    key_addresses = values + 4 * TILE_KEYS * params.head_dim
    return PackedTile(scratch.rest, values, key_addresses, key_addresses + 8 * TILE_KEYS)


@inner
def attend(params: Any, scratch: Scratch, unit: TiledUnit) -> int:
    """Compute the unit's attention, write its output and return the number of KV blocks visited."""
    start_rows(params, scratch, unit.q_head, 0, unit.token, unit.tokens)
    low = max(0, unit.high - params.window)
    high = unit.high + unit.tokens - 1
    for base in range(low // TILE_KEYS * TILE_KEYS, high, TILE_KEYS):
        begin, end = max(base, low), min(base + TILE_KEYS, high)
        pack_keys(params, scratch, unit, base, begin, end)
        pack_values(params, scratch, unit, base, begin, end)
        rows = unit.tokens * params.group
        # First all rows by the keys, then all by the values: either fits the first-level cache.
        for row in range(0, rows, TILE_ROWS):
            softmax_rows(params, scratch, unit, row, min(TILE_ROWS, rows - row), base)
        for row in range(0, rows, TILE_ROWS):
            add_visible_values(params, scratch, unit, row, min(TILE_ROWS, rows - row), base)
    finish_rows(params, scratch, unit.q_head, 0, unit.token, unit.tokens)
    blocks: int = (high - 1) // params.block_size - low // params.block_size + 1
    return blocks


@inner
def attend_masked(params: Any, scratch: Scratch, unit: TiledUnit) -> int:
    """The variant of ``attend`` for the ablation of ``window_skip``.

    Keys before the window are packed and scored, and their scores are discarded.
    """
    start_rows(params, scratch, unit.q_head, 0, unit.token, unit.tokens)
    low = max(0, unit.high - params.window)
    rows = unit.tokens * params.group
    for base in range(0, low, TILE_KEYS):
        end = min(base + TILE_KEYS, low)
        pack_keys(params, scratch, unit, base, base, end)
        pack_values(params, scratch, unit, base, base, end)
        for row in range(0, rows, TILE_ROWS):
            count = min(TILE_ROWS, rows - row)
            score_rows(params, scratch, row, count, 0, end - base)
    blocks: int = attend(params, scratch, unit) + low // params.block_size
    return blocks


@inner
def pack_keys(
    params: Any, scratch: Scratch, unit: TiledUnit, base: int, begin: int, end: int
) -> None:
    """Transpose one KV head's keys from ``begin`` to ``end`` into their columns of the tile.

    ``base`` is the tile's first key. Unused columns of the first and last vector contain copies of
    the first key, whose scores are masked.
    """
    tile, size = packed_tile(params, scratch), head_bytes(params)
    first = (begin - base) // LANES * LANES
    last = (end - base + LANES - 1) // LANES * LANES
    source = params.k_pool + key_offset(params, unit.sequence, begin) + unit.head * size
    for i in range(first, last):
        store_int64(tile.key_addresses + 8 * i, source)
    key = begin
    while key < end:
        stop = run_end(params, key, end)
        source = params.k_pool + key_offset(params, unit.sequence, key) + unit.head * size
        for i in range(key - base, stop - base):
            store_int64(tile.key_addresses + 8 * i, source)
            source += key_bytes(params)
        key = stop
    vectors = params.head_dim // LANES
    for i in range(first, last, LANES):
        transpose_strip(
            params, tile.key_addresses + 8 * i, tile.keys + 4 * i, 4 * TILE_KEYS, vectors
        )


@inner
def pack_values(
    params: Any, scratch: Scratch, unit: TiledUnit, base: int, begin: int, end: int
) -> None:
    """Copy one KV head's values from ``begin`` to ``end`` into the tile, widened to float32."""
    target, size = packed_tile(params, scratch).values, head_bytes(params)
    width, vectors = 4 * params.head_dim, params.head_dim // LANES
    key = begin
    while key < end:
        stop = run_end(params, key, end)
        source = params.v_pool + key_offset(params, unit.sequence, key) + unit.head * size
        for i in range(key - base, stop - base):
            copy_widened(params, target + width * i, source, vectors)
            source += key_bytes(params)
        key = stop


@inner
def score_rows(params: Any, scratch: Scratch, row: int, count: int, low: int, high: int) -> None:
    """Multiply up to ``TILE_ROWS`` rows by the tile's keys from ``low`` to ``high``."""
    width, pitch, steps = 4 * params.head_dim, 4 * TILE_KEYS, params.head_dim // LANES
    tile = packed_tile(params, scratch)
    for key in range(low // SCORE_KEYS * SCORE_KEYS, high, SCORE_KEYS):
        keys = tile.keys + 4 * key
        for i in range(row, row + count, SCORE_ROWS):
            scores, queries = scratch.scores + pitch * i + 4 * key, scratch.queries + width * i
            scores_tile(scores, pitch, queries, width, keys, pitch, steps, tile.spill)


@inner
def visible_keys(params: Any, unit: TiledUnit, row: int, base: int) -> tuple[int, int]:
    """Return the bounds of the tile's keys that a row sees, relative to the tile's first key."""
    high = unit.high + row // params.group
    return max(0, max(0, high - params.window) - base), min(TILE_KEYS, high - base)


@inner
def softmax_rows(
    params: Any, scratch: Scratch, unit: TiledUnit, row: int, count: int, base: int
) -> None:
    """Score up to ``TILE_ROWS`` rows against the packed tile and turn the scores into weights."""
    low, _ = visible_keys(params, unit, row, base)
    _, high = visible_keys(params, unit, row + count - 1, base)
    if low < high:
        score_rows(params, scratch, row, count, low, high)
        for i in range(row, row + count):
            low, high = visible_keys(params, unit, i, base)
            if low < high:
                softmax_row(params, scratch, i, low, high)


@inner
def add_visible_values(
    params: Any, scratch: Scratch, unit: TiledUnit, row: int, count: int, base: int
) -> None:
    """Add the weighted values of the packed tile to up to ``TILE_ROWS`` rows.

    Each row gets exactly the values of the keys that it sees, in ascending order. Keys that all
    rows see are computed in one register tile. A row that sees no key of the tile is unchanged.
    """
    low, first_high = visible_keys(params, unit, row, base)
    last_low, high = visible_keys(params, unit, row + count - 1, base)
    if low == last_low and first_high == high:
        add_values(params, scratch, row, count, low, high)
        return
    common_low, common_high = last_low, max(last_low, first_high)
    for i in range(row, row + count):
        low, high = visible_keys(params, unit, i, base)
        add_values(params, scratch, i, 1, low, min(high, common_low))
    add_values(params, scratch, row, count, common_low, common_high)
    for i in range(row, row + count):
        low, high = visible_keys(params, unit, i, base)
        add_values(params, scratch, i, 1, max(low, common_high), high)


@inner
def add_values(params: Any, scratch: Scratch, row: int, count: int, begin: int, end: int) -> None:
    """Add the tile's weighted values from ``begin`` to ``end`` (if any) to ``count`` rows."""
    if begin >= end:
        return
    width, pitch, keys = 4 * params.head_dim, 4 * TILE_KEYS, end - begin
    sums = scratch.sums + width * row
    weights = scratch.scores + pitch * row + 4 * begin
    values = packed_tile(params, scratch).values + width * begin
    column = 0
    while column + 4 * WIDE_COLUMNS <= width:
        target, source = sums + column, values + column
        if count > 1:
            add_weighted_tile_wide(target, width, weights, pitch, source, width, keys)
        else:
            add_weighted_row_wide(target, width, weights, pitch, source, width, keys)
        column += 4 * WIDE_COLUMNS
    while column < width:
        target, source = sums + column, values + column
        if count > 1:
            add_weighted_tile(target, width, weights, pitch, source, width, keys)
        else:
            add_weighted_row(target, width, weights, pitch, source, width, keys)
        column += 4 * LANES


@cache
def body(pool_dtype: np.dtype[Any], window_skip: bool = True) -> int:
    """Compile the body of tiled units (or load it from numba's cache) and return its address.

    ``pool_dtype`` is the NumPy dtype of the KV pools, ``window_skip`` whether keys before the
    window are skipped (``attend``) or computed (``attend_masked``).

    The body is a C function ``int64 (params *, memory, sequence, q_head, token, tokens, high)`` as
    in ``compile_body``. ``memory`` is the address of ``scratch_bytes`` bytes. The function returns
    the number of KV blocks visited.
    """
    return compile_body(_tiled if window_skip else _masked, pool_dtype)


def _tiled(params_pointer, memory, sequence, q_head, token, tokens, high):  # type: ignore[no-untyped-def]
    params, blocks = carray(params_pointer, 1)[0], 0
    scratch = divide_scratch(memory, padded_rows(tokens * params.group), params.head_dim)
    for first in range(q_head, q_head + params.group * params.kv_heads_per_unit, params.group):
        unit = TiledUnit(sequence, first, first // params.group_stride, token, tokens, high)
        blocks += attend(params, scratch, unit)
    return blocks


def _masked(params_pointer, memory, sequence, q_head, token, tokens, high):  # type: ignore[no-untyped-def]
    params, blocks = carray(params_pointer, 1)[0], 0
    scratch = divide_scratch(memory, padded_rows(tokens * params.group), params.head_dim)
    for first in range(q_head, q_head + params.group * params.kv_heads_per_unit, params.group):
        unit = TiledUnit(sequence, first, first // params.group_stride, token, tokens, high)
        blocks += attend_masked(params, scratch, unit)
    return blocks
