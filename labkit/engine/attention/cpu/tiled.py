"""The body of the tiled kernel: up to ``BQ`` query tokens against the keys they see.

The limit is arithmetic. A tile of keys and values is packed once and serves all rows of
the unit, register tile by register tile.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import carray, cfunc, from_dtype, types

from labkit.engine.attention.cpu.jit import inner
from labkit.engine.attention.cpu.rows import (
    LAYER,
    Scratch,
    add_values,
    carve,
    finish_rows,
    offset_of,
    pack_keys,
    run_end,
    score_rows,
    start_rows,
    stride_of,
    weigh_row,
    whole_tiles,
)
from labkit.engine.attention.cpu.tiles import KEYS, ROWS, copy_bytes


class Unit(NamedTuple):
    """``tokens`` query tokens from ``token`` on, for one KV head of one sequence.

    Token ``i`` of the unit sees the keys before ``high + i``.
    """

    sequence: int
    head: int
    token: int
    tokens: int
    high: int


@inner
def attend(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend, write the output, return the KV blocks walked."""
    start_rows(layer, scratch, unit.head, 0, unit.token, unit.tokens)
    low = max(0, unit.high - layer.window)
    high = unit.high + unit.tokens - 1
    for base in range(low // KEYS * KEYS, high, KEYS):
        begin, end = max(base, low), min(base + KEYS, high)
        pack_keys(layer, scratch, unit.head, scratch.keys, unit.sequence, base, begin, end)
        pack_values(layer, scratch, unit, base, begin, end)
        rows = unit.tokens * layer.group
        for row in range(0, rows, ROWS):
            fold_rows(layer, scratch, unit, row, min(ROWS, rows - row), base)
    finish_rows(layer, scratch, unit.head, 0, unit.token, unit.tokens)
    blocks: int = (high - 1) // layer.block_size - low // layer.block_size + 1
    return blocks


@inner
def attend_masked(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend without skipping: keys before the window are packed and scored, for nothing."""
    start_rows(layer, scratch, unit.head, 0, unit.token, unit.tokens)
    low, near = max(0, unit.high - layer.window), scratch.scores
    rows = unit.tokens * layer.group
    for base in range(0, low, KEYS):
        end = min(base + KEYS, low)
        pack_keys(layer, scratch, unit.head, scratch.keys, unit.sequence, base, base, end)
        pack_values(layer, scratch, unit, base, base, end)
        for row in range(0, rows, ROWS):
            count = min(ROWS, rows - row)
            score_rows(layer, scratch, scratch.keys, row, count, 0, end - base, near, near)
    blocks: int = attend(layer, scratch, unit) + low // layer.block_size
    return blocks


@inner
def pack_values(layer: Any, scratch: Scratch, unit: Unit, base: int, begin: int, end: int) -> None:
    """Copy one KV head's values from ``begin`` to ``end`` side by side."""
    width = 4 * layer.head_dim
    key = begin
    while key < end:
        stop = run_end(layer, key, end)
        source = layer.v_pool + offset_of(layer, unit.sequence, key) + unit.head * width
        for i in range(key - base, stop - base):
            copy_bytes(scratch.values + width * i, source, width)
            source += stride_of(layer)
        key = stop


@inner
def seen(layer: Any, unit: Unit, row: int, base: int) -> tuple[int, int]:
    """Return the keys, counted from ``base``, that a row sees of a tile."""
    high = unit.high + row // layer.group
    return max(0, max(0, high - layer.window) - base), min(KEYS, high - base)


@inner
def fold_rows(layer: Any, scratch: Scratch, unit: Unit, row: int, count: int, base: int) -> None:
    """Fold the packed tile into up to ``ROWS`` rows.

    Each row takes exactly the keys that it sees, in ascending order: those that all rows
    see go through one register tile. A row that sees none of the tile is left alone.
    """
    low, first_high = seen(layer, unit, row, base)
    last_low, high = seen(layer, unit, row + count - 1, base)
    if low >= high:
        return
    near = scratch.scores
    score_rows(layer, scratch, scratch.keys, row, count, low, high, near, near)
    if low == last_low and first_high == high:
        for i in range(row, row + count):
            weigh_row(layer, scratch, i, low, high)
        add_packed(layer, scratch, row, count, low, high)
        return
    common_low, common_high = last_low, max(last_low, first_high)
    for i in range(row, row + count):
        low, high = seen(layer, unit, i, base)
        if low < high:
            weigh_row(layer, scratch, i, low, high)
            add_packed(layer, scratch, i, 1, low, min(high, common_low))
    add_packed(layer, scratch, row, count, common_low, common_high)
    for i in range(row, row + count):
        low, high = seen(layer, unit, i, base)
        add_packed(layer, scratch, i, 1, max(low, common_high), high)


@inner
def add_packed(layer: Any, scratch: Scratch, row: int, count: int, begin: int, end: int) -> None:
    """Add the tile's weighted values from ``begin`` to ``end``, if any, to some rows."""
    if begin < end:
        width = 4 * layer.head_dim
        values = scratch.values + width * begin
        near = scratch.scores
        add_values(layer, scratch, row, count, begin, end - begin, values, width, near, near)


@cache
def body(window_skip: bool = True) -> int:
    """Return the address of the body in C's calling convention, compiled or from cache.

    ``window_skip``: whether keys before the window are left out.

    int64 (layer: rows.LAYER *, memory, sequence, head, token, tokens, high) returns the
    KV blocks walked; ``memory`` is the address of the worker's ``rows.scratch_bytes``,
    zeros before its first use.
    """
    signature = types.int64(types.CPointer(from_dtype(LAYER)), *[types.int64] * 6)
    kind = _tiled if window_skip else _masked
    compiled = cfunc(signature, cache=True, error_model="numpy")(kind)
    return int(compiled.address)


def _tiled(
    layers: Any, memory: int, sequence: int, head: int, token: int, tokens: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    scratch = carve(memory, whole_tiles(tokens * layer.group), 1, layer.head_dim)
    return attend(layer, scratch, Unit(sequence, head, token, tokens, high))


def _masked(
    layers: Any, memory: int, sequence: int, head: int, token: int, tokens: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    scratch = carve(memory, whole_tiles(tokens * layer.group), 1, layer.head_dim)
    return attend_masked(layer, scratch, Unit(sequence, head, token, tokens, high))
