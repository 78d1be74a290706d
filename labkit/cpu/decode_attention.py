"""The body of the decode kernel: one query token against its whole context.

The limit is memory. A unit serves several KV heads, whose keys lie side by side, and reads
every key and value once, in the order of memory, while it prefetches what comes next.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, types

from labkit.cpu.attention_intrinsics import TILE_KEYS
from labkit.cpu.decode_microkernels import ROWS, RUN, add_lanes, dot, dots, spread, spreads
from labkit.cpu.jit import inlined, inner
from labkit.cpu.kernel_params import PARAMS_DTYPES, params_type
from labkit.cpu.online_softmax import (
    Scratch,
    carve,
    finish_rows,
    head_bytes,
    keep_rows,
    offset_of,
    row_bytes,
    run_end,
    start_rows,
    stride_of,
    weigh_row,
)
from labkit.cpu.simd_emitter import VECTOR_BYTES
from labkit.cpu.vector_registers import LANES

AHEAD = RUN * RUN  # keys between what is read and what is prefetched


class Unit(NamedTuple):
    """One query token for some KV heads from ``head`` on, whose rows follow each other.

    The token sees the keys from ``low`` to ``high``.
    """

    sequence: int
    head: int
    heads: int
    token: int
    low: int
    high: int


@cache
def scratch_bytes(rows: int, head_dim: int) -> int:
    """Return the bytes of a worker's scratch for units of so many rows."""
    return row_bytes(rows, head_dim) + rows * LANES * VECTOR_BYTES


@inner
def attend(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend, write the output, return the KV blocks walked."""
    start(layer, scratch, unit)
    walk(layer, scratch, unit)
    for i in range(unit.heads):
        finish_rows(layer, scratch, unit.head + i, i * layer.group, unit.token, 1)
    return blocks_of(layer, unit.low, unit.high) * unit.heads


@inner
def attend_part(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend to a partition of the keys, or without skipping those before the window.

    The kernel for the ablations of both; ``unit.low`` is where the window begins.
    """
    start(layer, scratch, unit)
    begin, end = part_of(layer, unit.low if layer.window_skip != 0 else 0, unit.high)
    seen = Unit(unit.sequence, unit.head, unit.heads, unit.token, max(begin, unit.low), end)
    for base in range(begin // TILE_KEYS * TILE_KEYS, min(end, unit.low), TILE_KEYS):
        first, stop = max(base, begin), min(base + TILE_KEYS, end, unit.low)
        # For nothing: both are read, and what they score is overwritten.
        score_keys(layer, scratch, seen, layer.k_pool, base, first, stop)
        score_keys(layer, scratch, seen, layer.v_pool, base, first, stop)
    walk(layer, scratch, seen)
    for i in range(unit.heads):
        if layer.partitions > 1:
            keep_rows(layer, scratch, unit.head + i, i * layer.group, unit.token)
        else:
            finish_rows(layer, scratch, unit.head + i, i * layer.group, unit.token, 1)
    return blocks_of(layer, begin, end) * unit.heads


@inner
def start(layer: Any, scratch: Scratch, unit: Unit) -> None:
    """Load the unit's queries."""
    for i in range(unit.heads):
        start_rows(layer, scratch, unit.head + i, i * layer.group, unit.token, 1)


@inner
def walk(layer: Any, scratch: Scratch, unit: Unit) -> None:
    """Fold the keys that the unit sees into its rows, tile by tile."""
    for base in range(unit.low // TILE_KEYS * TILE_KEYS, unit.high, TILE_KEYS):
        begin, end = max(base, unit.low), min(base + TILE_KEYS, unit.high)
        score_keys(layer, scratch, unit, layer.k_pool, base, begin, end)
        for row in range(unit.heads * layer.group):
            weigh_row(layer, scratch, row, begin - base, end - base)
        add_values(layer, scratch, unit, base, begin, end)


@inner
def score_keys(
    layer: Any, scratch: Scratch, unit: Unit, pool: int, base: int, begin: int, end: int
) -> None:
    """Score the keys of a pool from ``begin`` to ``end``, in the tile from ``base`` on."""
    for strip in range(begin // LANES * LANES, end, LANES):
        key, stop = max(strip, begin), min(strip + LANES, end)
        while key < stop:
            count = run_of(layer, key, stop)
            lanes = scratch.rest + VECTOR_BYTES * (key - strip)
            ahead = ahead_of(layer, unit, pool, key, end, layer.v_pool, begin)
            source = place(layer, unit, pool, key)
            for row in range(0, unit.heads * layer.group, layer.group):
                multiply(layer, scratch, row, lanes, source, count, ahead)
                source += head_bytes(layer)
                ahead += head_bytes(layer)
            key += count
        for row in range(unit.heads * layer.group):
            scores = scratch.scores + 4 * (TILE_KEYS * row + strip - base)
            add_lanes(scores, scratch.rest + VECTOR_BYTES * LANES * row)


@inlined
def multiply(
    layer: Any, scratch: Scratch, row: int, lanes: int, key: int, count: int, ahead: int
) -> None:
    """Multiply the rows of one KV head from ``row`` on with one key or ``RUN``."""
    width, pitch = 4 * layer.head_dim, VECTOR_BYTES * LANES
    stride, vectors = stride_of(layer), layer.head_dim // LANES
    end = row + layer.group
    while row < end:
        sums, queries = lanes + pitch * row, scratch.queries + width * row
        if count < RUN:
            dot(layer, 1, sums, pitch, queries, width, key, stride, vectors, ahead)
            row += 1
        else:
            rows = min(ROWS, end - row)
            dots(layer, rows, sums, pitch, queries, width, key, stride, vectors, ahead)
            row += rows


@inner
def add_values(layer: Any, scratch: Scratch, unit: Unit, base: int, begin: int, end: int) -> None:
    """Add the weighted values from ``begin`` to ``end``, of the tile from ``base`` on."""
    key = begin
    while key < end:
        count = run_of(layer, key, end)
        weights = scratch.scores + 4 * (key - base)
        ahead = ahead_of(layer, unit, layer.v_pool, key, end, layer.k_pool, end)
        source = place(layer, unit, layer.v_pool, key)
        for row in range(0, unit.heads * layer.group, layer.group):
            accumulate(layer, scratch, row, weights, source, count, ahead)
            source += head_bytes(layer)
            ahead += head_bytes(layer)
        key += count


@inlined
def accumulate(
    layer: Any, scratch: Scratch, row: int, weights: int, value: int, count: int, ahead: int
) -> None:
    """Add one weighted value or ``RUN`` to the rows of one KV head from ``row`` on."""
    width, pitch = 4 * layer.head_dim, 4 * TILE_KEYS
    stride, vectors = stride_of(layer), layer.head_dim // LANES
    end = row + layer.group
    while row < end:
        sums, factors = scratch.sums + width * row, weights + pitch * row
        if count < RUN:
            spread(layer, 1, sums, width, factors, pitch, value, stride, vectors, ahead)
            row += 1
        else:
            rows = min(ROWS, end - row)
            spreads(layer, rows, sums, width, factors, pitch, value, stride, vectors, ahead)
            row += rows


@inlined
def run_of(layer: Any, key: int, end: int) -> int:
    """Return how many keys from ``key`` on to take at once: ``RUN`` side by side, else one."""
    return RUN if run_end(layer, key, end) - key >= RUN else 1


@inlined
def place(layer: Any, unit: Unit, pool: int, key: int) -> int:
    """Return the address of the unit's first head of a key."""
    address: int = pool + offset_of(layer, unit.sequence, key) + head_bytes(layer) * unit.head
    return address


@inlined
def ahead_of(
    layer: Any, unit: Unit, pool: int, key: int, end: int, following: int, first: int
) -> int:
    """Return the first of ``RUN`` keys to prefetch at a key; past ``end`` in ``following``.

    While ``RUN`` keys are read side by side, ``RUN`` others are prefetched, ``RUN`` keys
    apart: they mostly lie in as many pages, and as many streams are what memory is read
    fastest in. Each run of the ``AHEAD`` keys takes its share of the next ``AHEAD``.
    """
    key = key // AHEAD * AHEAD + AHEAD + key % AHEAD // RUN
    if key >= end:
        pool, key = following, key - end + first
    return place(layer, unit, pool, min(key, unit.high - 1))


@inner
def part_of(layer: Any, begin: int, end: int) -> tuple[int, int]:
    """Return the partition's share of the keys from ``begin`` to ``end``, in whole tiles."""
    first = begin // TILE_KEYS
    tiles = (end + TILE_KEYS - 1) // TILE_KEYS - first
    share = (tiles + layer.partitions - 1) // layer.partitions
    start = (first + layer.partition * share) * TILE_KEYS
    return max(begin, start), min(end, start + share * TILE_KEYS)


@inner
def blocks_of(layer: Any, begin: int, end: int) -> int:
    """Return how many KV blocks hold the keys from ``begin`` to ``end``."""
    if begin >= end:
        return 0
    blocks: int = (end - 1) // layer.block_size - begin // layer.block_size + 1
    return blocks


@cache
def body(stored: np.dtype[Any], plain: bool = True) -> int:
    """Return the address of the body in C's calling convention, compiled or from cache.

    ``stored``: the pools' dtype. ``plain``: all keys of the window by one unit, else what
    ``attend_part`` does.

    int64 (layer: of arguments.LAYERS *, memory, sequence, head, heads, token, high) returns the
    KV blocks walked; ``memory`` is the address of the worker's ``scratch_bytes``.
    """
    signature = types.int64(types.CPointer(params_type(PARAMS_DTYPES[stored])), *[types.int64] * 6)
    compiled = cfunc(signature, cache=True, error_model="numpy")(_decode if plain else _part)
    return int(compiled.address)


def _decode(
    layers: Any, memory: int, sequence: int, head: int, heads: int, token: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    scratch = carve(memory, heads * layer.group, layer.head_dim)
    low = max(0, high - layer.window)
    return attend(layer, scratch, Unit(sequence, head, heads, token, low, high))


def _part(
    layers: Any, memory: int, sequence: int, head: int, heads: int, token: int, high: int
) -> int:
    layer = carray(layers, 1)[0]
    scratch = carve(memory, heads * layer.group, layer.head_dim)
    low = max(0, high - layer.window)
    return attend_part(layer, scratch, Unit(sequence, head, heads, token, low, high))
