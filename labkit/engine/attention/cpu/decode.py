"""The body of the decode kernel: one query token against its whole context.

The limit is memory. A unit serves several KV heads, whose keys lie side by side, and
reads a strip of keys in the order of memory before it is used; while it multiplies, it
prefetches what comes next.
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
    keep_rows,
    offset_of,
    pack_keys,
    run_end,
    score_rows,
    start_rows,
    stride_of,
    weigh_row,
    whole_tiles,
)
from labkit.engine.attention.cpu.simd import LANES, LINE
from labkit.engine.attention.cpu.tiles import KEYS, ROWS, touch


class Unit(NamedTuple):
    """One query token for the KV heads from ``head`` on, whose rows lie ``height`` apart.

    The token sees the keys from ``low`` to ``high``.
    """

    sequence: int
    head: int
    heads: int
    token: int
    low: int
    high: int
    height: int


@inner
def attend(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend, write the output, return the KV blocks walked."""
    for i in range(unit.heads):
        start_rows(layer, scratch, unit.head + i, i * unit.height, unit.token, 1)
    walk(layer, scratch, unit)
    for i in range(unit.heads):
        finish_rows(layer, scratch, unit.head + i, i * unit.height, unit.token, 1)
    return blocks_of(layer, unit.low, unit.high) * unit.heads


@inner
def attend_part(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend to a partition of the keys, or without skipping those before the window.

    The kernel for the ablations of both; ``unit.low`` is where the window begins.
    """
    for i in range(unit.heads):
        start_rows(layer, scratch, unit.head + i, i * unit.height, unit.token, 1)
    begin, end = part_of(layer, unit.low if layer.window_skip != 0 else 0, unit.high)
    seen = Unit(
        unit.sequence, unit.head, unit.heads, unit.token, max(begin, unit.low), end, unit.height
    )
    read_masked(layer, scratch, seen, begin, min(end, unit.low))
    walk(layer, scratch, seen)
    for i in range(unit.heads):
        if layer.partitions > 1:
            keep_rows(layer, scratch, unit.head + i, i * unit.height, unit.token)
        else:
            finish_rows(layer, scratch, unit.head + i, i * unit.height, unit.token, 1)
    return blocks_of(layer, begin, end) * unit.heads


@inner
def walk(layer: Any, scratch: Scratch, unit: Unit) -> None:
    """Fold the keys that the unit sees into its rows, tile by tile."""
    for base in range(unit.low // KEYS * KEYS, unit.high, KEYS):
        begin, end = max(base, unit.low), min(base + KEYS, unit.high)
        take_keys(layer, scratch, unit, base, begin, end)
        for i in range(unit.heads):
            weigh_head(layer, scratch, unit, i, base, begin, end)
        take_values(layer, scratch, unit, base, begin, end)


@inner
def read_masked(layer: Any, scratch: Scratch, unit: Unit, begin: int, end: int) -> None:
    """Read and score the keys and read the values from ``begin`` to ``end``, for nothing."""
    near = scratch.scores
    for base in range(begin // KEYS * KEYS, end, KEYS):
        first, stop = max(base, begin), min(base + KEYS, end)
        take_keys(layer, scratch, unit, base, first, stop)
        for i in range(unit.heads):
            keys = scratch.keys + i * 4 * KEYS * layer.head_dim
            for row in range(i * unit.height, i * unit.height + layer.group, ROWS):
                count = min(ROWS, i * unit.height + layer.group - row)
                score_rows(layer, scratch, keys, row, count, first - base, stop - base, near, near)
        read_ahead(layer, scratch, unit, layer.v_pool, first, stop)


@inner
def part_of(layer: Any, begin: int, end: int) -> tuple[int, int]:
    """Return the partition's share of the keys from ``begin`` to ``end``, in whole tiles."""
    first = begin // KEYS
    tiles = (end + KEYS - 1) // KEYS - first
    share = (tiles + layer.partitions - 1) // layer.partitions
    start = (first + layer.partition * share) * KEYS
    return max(begin, start), min(end, start + share * KEYS)


@inner
def blocks_of(layer: Any, begin: int, end: int) -> int:
    """Return how many KV blocks hold the keys from ``begin`` to ``end``."""
    if begin >= end:
        return 0
    blocks: int = (end - 1) // layer.block_size - begin // layer.block_size + 1
    return blocks


@inner
def read_ahead(layer: Any, scratch: Scratch, unit: Unit, pool: int, begin: int, end: int) -> None:
    """Bring the unit's heads of some keys or values near, in the order of memory."""
    width = 4 * layer.head_dim
    vectors = unit.heads * layer.head_dim // LANES
    key = begin
    while key < end:
        stop = run_end(layer, key, end)
        source = pool + offset_of(layer, unit.sequence, key) + unit.head * width
        if unit.heads == layer.num_kv_heads:
            touch(source, (stop - key) * vectors, scratch.values)
        else:
            for _ in range(stop - key):
                touch(source, vectors, scratch.values)
                source += stride_of(layer)
        key = stop


@inner
def stretch(layer: Any, scratch: Scratch, unit: Unit, pool: int, key: int) -> tuple[int, int]:
    """Return the first and last cache line of the keys side by side from ``key`` on.

    A line that is near anyway where there is nothing to prefetch: past the context, or
    where the unit has only some of the heads.
    """
    if key >= unit.high or unit.heads < layer.num_kv_heads:
        return scratch.scores, scratch.scores
    ahead = pool + offset_of(layer, unit.sequence, key)
    return ahead, ahead + (run_end(layer, key, unit.high) - key) * stride_of(layer) - LINE


@inner
def take_keys(layer: Any, scratch: Scratch, unit: Unit, base: int, begin: int, end: int) -> None:
    """Transpose a tile's keys of all heads, strip by strip."""
    tile = 4 * KEYS * layer.head_dim
    for strip in range(begin // LANES * LANES, end, LANES):
        first, stop = max(strip, begin), min(strip + LANES, end)
        read_ahead(layer, scratch, unit, layer.k_pool, first, stop)
        for i in range(unit.heads):
            keys = scratch.keys + i * tile
            pack_keys(layer, scratch, unit.head + i, keys, unit.sequence, base, first, stop)


@inner
def weigh_head(
    layer: Any, scratch: Scratch, unit: Unit, i: int, base: int, begin: int, end: int
) -> None:
    """Score a tile's keys for the unit's ``i``-th head; prefetch its share of the values."""
    keys = scratch.keys + i * 4 * KEYS * layer.head_dim
    low, high = begin - base, end - base
    ahead, last = stretch(layer, scratch, unit, layer.v_pool, base + i * KEYS // unit.heads)
    for row in range(i * unit.height, i * unit.height + layer.group, ROWS):
        count = min(ROWS, i * unit.height + layer.group - row)
        score_rows(layer, scratch, keys, row, count, low, high, ahead, last)
        for j in range(row, row + count):
            weigh_row(layer, scratch, j, low, high)


@inner
def take_values(layer: Any, scratch: Scratch, unit: Unit, base: int, begin: int, end: int) -> None:
    """Add a tile's weighted values to all heads, strip by strip; prefetch the next keys."""
    width = 4 * layer.head_dim
    for strip in range(begin // LANES * LANES, end, LANES):
        stop = min(strip + LANES, end)
        key = max(strip, begin)
        read_ahead(layer, scratch, unit, layer.v_pool, key, stop)
        ahead, last = stretch(layer, scratch, unit, layer.k_pool, strip + KEYS)
        while key < stop:
            following = run_end(layer, key, stop)
            values = layer.v_pool + offset_of(layer, unit.sequence, key) + unit.head * width
            for i in range(unit.heads):
                for row in range(i * unit.height, i * unit.height + layer.group, ROWS):
                    count = min(ROWS, i * unit.height + layer.group - row)
                    ahead = add_values(
                        layer,
                        scratch,
                        row,
                        count,
                        key - base,
                        following - key,
                        values + i * width,
                        stride_of(layer),
                        ahead,
                        last,
                    )
            key = following


@cache
def body(plain: bool = True) -> int:
    """Return the address of the body in C's calling convention, compiled or from cache.

    ``plain``: all keys of the window by one unit, else what ``attend_part`` does.

    int64 (layer: rows.LAYER *, memory, sequence, head, heads, token, high) returns the
    KV blocks walked; ``memory`` is the address of the worker's ``rows.scratch_bytes``,
    zeros before its first use.
    """
    signature = types.int64(types.CPointer(from_dtype(LAYER)), *[types.int64] * 6)
    compiled = cfunc(signature, cache=True, error_model="numpy")(_decode if plain else _part)
    return int(compiled.address)


def _decode(
    layers: Any, memory: int, sequence: int, head: int, heads: int, token: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    height = whole_tiles(layer.group)
    scratch = carve(memory, heads * height, heads, layer.head_dim)
    low = max(0, high - layer.window)
    return attend(layer, scratch, Unit(sequence, head, heads, token, low, high, height))


def _part(
    layers: Any, memory: int, sequence: int, head: int, heads: int, token: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    height = whole_tiles(layer.group)
    scratch = carve(memory, heads * height, heads, layer.head_dim)
    low = max(0, high - layer.window)
    return attend_part(layer, scratch, Unit(sequence, head, heads, token, low, high, height))
