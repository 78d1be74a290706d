"""The arithmetic of the decode kernel: one query token against its whole context.

Decode is limited by memory bandwidth. A unit computes several KV heads, whose keys are adjacent in
memory. It reads every key and value once, in memory order, and prefetches the next ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from labkit.cpu.attention.attention_intrinsics import TILE_KEYS
from labkit.cpu.attention.attention_params import compile_body
from labkit.cpu.attention.decode_attention_microkernels import (
    RUN_KEYS,
    add_value,
    add_value_run,
    dot_key,
    dot_run,
    run_rows,
    sum_lanes,
)
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
    store_partial_rows,
)
from labkit.cpu.runtime.jit import inlined, inner
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import VECTOR_BYTES

AHEAD = RUN_KEYS * RUN_KEYS  # distance of the prefetches (keys)


class DecodeUnit(NamedTuple):
    """One query token and its query heads from ``q_head`` on.

    The heads are ``params.group`` query heads of each of ``heads`` KV heads, from KV head ``head``
    on. The token attends to the keys from ``low`` to ``high`` (exclusive). The rows of the unit are
    the query heads of its first KV head, then those of the second, ...
    """

    sequence: int
    q_head: int
    head: int
    heads: int
    token: int
    low: int
    high: int


@cache
def scratch_bytes(rows: int, head_dim: int) -> int:
    """Return the bytes of scratch memory that a worker needs for units of ``rows`` rows."""
    return row_bytes(rows, head_dim) + rows * LANES * VECTOR_BYTES


@inner
def attend(params: Any, scratch: Scratch, unit: DecodeUnit) -> int:
    """Compute the unit's attention, write its output and return the number of KV blocks visited."""
    start(params, scratch, unit)
    fold_keys(params, scratch, unit)
    for row in range(0, unit.heads * params.group, params.group):
        finish_rows(params, scratch, unit.q_head + row, row, unit.token, 1)
    return block_count(params, unit.low, unit.high) * unit.heads


@inner
def attend_part(params: Any, scratch: Scratch, unit: DecodeUnit, partition: int) -> int:
    """The variant of ``attend`` for the ablations of split-KV and ``window_skip``.

    The unit attends only to this partition of the keys. The window starts at ``unit.low``. Without
    ``window_skip``, the keys before it are read too, but do not affect the result.
    """
    start(params, scratch, unit)
    first_key = unit.low if params.window_skip != 0 else 0
    begin, end = partition_bounds(params, first_key, unit.high, partition)
    visible = DecodeUnit(
        unit.sequence, unit.q_head, unit.head, unit.heads, unit.token, max(begin, unit.low), end
    )
    for base in range(begin // TILE_KEYS * TILE_KEYS, min(end, unit.low), TILE_KEYS):
        first, stop = max(base, begin), min(base + TILE_KEYS, end, unit.low)
        # This variant pays for reading the keys and values before the window; ``fold_keys``
        # overwrites their scores.
        score_keys(params, scratch, visible, params.k_pool, base, first, stop)
        score_keys(params, scratch, visible, params.v_pool, base, first, stop)
    fold_keys(params, scratch, visible)
    for row in range(0, unit.heads * params.group, params.group):
        if params.partitions > 1:
            store_partial_rows(params, scratch, unit.q_head + row, row, unit.token, partition)
        else:
            finish_rows(params, scratch, unit.q_head + row, row, unit.token, 1)
    return block_count(params, begin, end) * unit.heads


@inner
def start(params: Any, scratch: Scratch, unit: DecodeUnit) -> None:
    """Load the unit's queries, and reset the softmax state and the sums of its rows."""
    for row in range(0, unit.heads * params.group, params.group):
        start_rows(params, scratch, unit.q_head + row, row, unit.token, 1)


@inner
def fold_keys(params: Any, scratch: Scratch, unit: DecodeUnit) -> None:
    """Attend to the keys from ``unit.low`` to ``unit.high``, tile by tile."""
    for base in range(unit.low // TILE_KEYS * TILE_KEYS, unit.high, TILE_KEYS):
        begin, end = max(base, unit.low), min(base + TILE_KEYS, unit.high)
        score_keys(params, scratch, unit, params.k_pool, base, begin, end)
        for row in range(unit.heads * params.group):
            softmax_row(params, scratch, row, begin - base, end - base)
        add_values(params, scratch, unit, base, begin, end)


@inner
def score_keys(
    params: Any, scratch: Scratch, unit: DecodeUnit, pool: int, base: int, begin: int, end: int
) -> None:
    """Write the scores of the keys from ``begin`` to ``end``, in the tile that starts at ``base``.

    ``pool`` is the pool from which the keys are read.
    """
    for strip in range(begin // LANES * LANES, end, LANES):
        key, stop = max(strip, begin), min(strip + LANES, end)
        while key < stop:
            count = run_length(params, key, stop)
            lanes = scratch.rest + VECTOR_BYTES * (key - strip)
            ahead = prefetch_address(params, unit, pool, key, end, params.v_pool, begin)
            source = key_address(params, unit, pool, key)
            for row in range(0, unit.heads * params.group, params.group):
                score_run(params, scratch, row, lanes, source, count, ahead)
                source += head_bytes(params)
                ahead += head_bytes(params)
            key += count
        for row in range(unit.heads * params.group):
            scores = scratch.scores + 4 * (TILE_KEYS * row + strip - base)
            sum_lanes(scores, scratch.rest + VECTOR_BYTES * LANES * row)


@inlined
def score_run(
    params: Any, scratch: Scratch, row: int, lanes: int, key: int, count: int, ahead: int
) -> None:
    """Multiply the query rows of one KV head (from ``row`` on) by ``count`` adjacent keys.

    ``count`` is 1 or ``RUN_KEYS``. ``key`` is the address of the first key, ``ahead`` that of the
    keys to prefetch, ``lanes`` that of row 0's products, which ``sum_lanes`` later sums.
    """
    width, pitch = 4 * params.head_dim, VECTOR_BYTES * LANES
    stride, vectors = key_bytes(params), params.head_dim // LANES
    end = row + params.group
    while row < end:
        sums, queries = lanes + pitch * row, scratch.queries + width * row
        if count < RUN_KEYS:
            dot_key(params, 1, sums, pitch, queries, width, key, stride, vectors, ahead)
            row += 1
        else:
            rows = min(run_rows(params), end - row)
            dot_run(params, rows, sums, pitch, queries, width, key, stride, vectors, ahead)
            row += rows


@inner
def add_values(
    params: Any, scratch: Scratch, unit: DecodeUnit, base: int, begin: int, end: int
) -> None:
    """Add the weighted values of the keys from ``begin`` to ``end`` to the unit's sums.

    ``base`` is the first key of the tile that contains them.
    """
    key = begin
    while key < end:
        count = run_length(params, key, end)
        weights = scratch.scores + 4 * (key - base)
        ahead = prefetch_address(params, unit, params.v_pool, key, end, params.k_pool, end)
        source = key_address(params, unit, params.v_pool, key)
        for row in range(0, unit.heads * params.group, params.group):
            add_value_rows(params, scratch, row, weights, source, count, ahead)
            source += head_bytes(params)
            ahead += head_bytes(params)
        key += count


@inlined
def add_value_rows(
    params: Any, scratch: Scratch, row: int, weights: int, value: int, count: int, ahead: int
) -> None:
    """Add ``count`` adjacent values, weighted, to the rows of one KV head (from ``row`` on).

    ``count`` is 1 or ``RUN_KEYS``. ``value`` is the address of the first value, ``weights`` that of
    row 0's weights, ``ahead`` that of the values to prefetch.
    """
    width, pitch = 4 * params.head_dim, 4 * TILE_KEYS
    stride, vectors = key_bytes(params), params.head_dim // LANES
    end = row + params.group
    while row < end:
        sums, factors = scratch.sums + width * row, weights + pitch * row
        if count < RUN_KEYS:
            add_value(params, 1, sums, width, factors, pitch, value, stride, vectors, ahead)
            row += 1
        else:
            rows = min(run_rows(params), end - row)
            add_value_run(params, rows, sums, width, factors, pitch, value, stride, vectors, ahead)
            row += rows


@inlined
def run_length(params: Any, key: int, end: int) -> int:
    """Return the number of keys to read together: ``RUN_KEYS`` if they are adjacent, else 1."""
    return RUN_KEYS if run_end(params, key, end) - key >= RUN_KEYS else 1


@inlined
def key_address(params: Any, unit: DecodeUnit, pool: int, key: int) -> int:
    """Return the address of the key, or the value, of the unit's first KV head at index ``key``.

    ``pool``: the address of the layer's key pool or value pool.
    """
    address: int = pool + key_offset(params, unit.sequence, key) + head_bytes(params) * unit.head
    return address


@inlined
def prefetch_address(
    params: Any, unit: DecodeUnit, pool: int, key: int, end: int, following: int, first: int
) -> int:
    """Return the address of the first key to prefetch while the run that starts at ``key`` is read.

    A run is ``RUN_KEYS`` adjacent keys. While it is read, ``RUN_KEYS`` other keys are prefetched,
    which are ``RUN_KEYS`` keys apart. They mostly lie in different pages, so memory is read in
    several streams, which is fastest. In this way, the next ``AHEAD`` keys are prefetched while
    ``AHEAD`` keys are read. Past ``end``, keys of the pool ``following`` are prefetched instead,
    from key ``first`` on, because that pool is read next.
    """
    key = key // AHEAD * AHEAD + AHEAD + key % AHEAD // RUN_KEYS
    if key >= end:
        pool, key = following, key - end + first
    return key_address(params, unit, pool, min(key, unit.high - 1))


@inner
def partition_bounds(params: Any, begin: int, end: int, partition: int) -> tuple[int, int]:
    """Return the bounds of a partition of the keys from ``begin`` to ``end``.

    Partitions consist of entire tiles, except at ``begin`` and ``end``.
    """
    first = begin // TILE_KEYS
    tiles = (end + TILE_KEYS - 1) // TILE_KEYS - first
    share = (tiles + params.partitions - 1) // params.partitions
    start = (first + partition * share) * TILE_KEYS
    return max(begin, start), min(end, start + share * TILE_KEYS)


@inner
def block_count(params: Any, begin: int, end: int) -> int:
    """Return the number of KV blocks that contain the keys from ``begin`` to ``end``."""
    if begin >= end:
        return 0
    blocks: int = (end - 1) // params.block_size - begin // params.block_size + 1
    return blocks


@cache
def body(pool_dtype: np.dtype[Any], plain: bool = True) -> int:
    """Compile the body of decode units (or load it from numba's cache) and return its address.

    ``pool_dtype`` is the NumPy dtype of the KV pools. If ``plain``, units attend to all keys of
    the window (``attend``), else ``attend_part`` is compiled.

    The body is a C function ``int64 (params *, memory, sequence, q_head, partition, token, high)``
    as in ``compile_body``. ``memory`` is the address of ``scratch_bytes`` bytes. The function
    returns the number of KV blocks visited.
    """
    return compile_body(_decode if plain else _part, pool_dtype)


def _decode(params_pointer, memory, sequence, q_head, _, token, high):  # type: ignore[no-untyped-def]
    params = carray(params_pointer, 1)[0]
    scratch, unit = _begin_unit(params, memory, sequence, q_head, token, high)
    return attend(params, scratch, unit)


def _part(params_pointer, memory, sequence, q_head, partition, token, high):  # type: ignore[no-untyped-def]
    params = carray(params_pointer, 1)[0]
    scratch, unit = _begin_unit(params, memory, sequence, q_head, token, high)
    return attend_part(params, scratch, unit, partition)


@inner
def _begin_unit(
    params: Any, memory: int, sequence: int, q_head: int, token: int, high: int
) -> tuple[Scratch, DecodeUnit]:
    heads, low = params.kv_heads_per_unit, max(0, high - params.window)
    scratch = divide_scratch(memory, heads * params.group, params.head_dim)
    head = q_head // params.group_stride
    return scratch, DecodeUnit(sequence, q_head, head, heads, token, low, high)
