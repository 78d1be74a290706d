"""The arithmetic that decode and tiled share: some query rows against one KV head.

Rows are the query heads of a KV head for consecutive tokens of one sequence,
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
from labkit.engine.attention.cpu.simd import LANES, LINE
from labkit.engine.attention.cpu.tiles import (
    KEYS,
    LINES_AHEAD,
    ROWS,
    WIDE,
    clear,
    copy_bytes,
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
    touch,
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
        ("group", np.int64),  # query heads that share a KV head
        ("head_dim", np.int64),
        ("block_size", np.int64),
        ("window", np.int64),
        ("query_scale", np.float32),
        ("softcap", np.float32),  # in base 2; 0: off
    ]
)


class Unit(NamedTuple):
    """``tokens`` query tokens from ``token`` on, for ``heads`` KV heads of one sequence.

    Token ``i`` of the unit sees the keys before ``high + i``. Each KV head has its own
    rows of scratch, ``height`` apart.
    """

    sequence: int
    head: int
    heads: int
    token: int
    tokens: int
    high: int
    height: int


class Ahead(NamedTuple):
    """What to prefetch while a tile is folded: addresses, ``last`` of both pools."""

    keys: int
    last_key: int
    values: int
    last_value: int


class Scratch(NamedTuple):
    """One worker's memory: addresses (bytes) of its parts, float32 but for ``sources``."""

    queries: int  # [heads * height, head_dim], scaled
    sums: int  # [heads * height, head_dim], weighted values
    scores: int  # [ROWS, KEYS]
    keys: int  # [head_dim, KEYS], a tile transposed
    values: int  # [KEYS, head_dim]
    zeros: int  # [MAX_HEAD_DIM]
    states: int  # [heads * height, 2], running maximum and sum
    sources: int  # int64 [KEYS], addresses of a tile's keys
    bounds: int  # int64 [height, 2], first and last + 1 key that each row sees


def whole_tiles(rows: int) -> int:
    """Return ``rows`` rounded up to whole register tiles."""
    return (rows + ROWS - 1) // ROWS * ROWS


def scratch_bytes(rows: int, heads: int, head_dim: int) -> int:
    """Return the bytes of a worker's scratch for ``rows`` rows of each of ``heads`` KV heads."""
    height = whole_tiles(rows)
    floats = (2 * heads * height + 2 * KEYS) * head_dim + ROWS * KEYS
    floats += 2 * heads * height + MAX_HEAD_DIM
    return -(-(4 * floats + 8 * KEYS + 16 * height) // 64) * 64


@inner
def carve(memory: int, rows: int, head_dim: int) -> Scratch:
    """Divide a worker's memory; the zeros lie first, so that nothing else ever lies there."""
    sources = memory + 4 * MAX_HEAD_DIM
    queries = sources + 8 * KEYS
    sums = queries + 4 * rows * head_dim
    scores = sums + 4 * rows * head_dim
    keys = scores + 4 * ROWS * KEYS
    values = keys + 4 * head_dim * KEYS
    states = values + 4 * head_dim * KEYS
    bounds = states + 8 * rows
    return Scratch(queries, sums, scores, keys, values, memory, states, sources, bounds)


@inner
def attend(layer: Any, scratch: Scratch, unit: Unit) -> int:
    """Attend from one unit's rows, write their output, return the KV blocks walked."""
    bound_rows(layer, scratch, unit)
    for i in range(unit.heads):
        start_rows(layer, scratch, unit, unit.head + i, i * unit.height)
    low = max(0, unit.high - layer.window)
    high = unit.high + unit.tokens - 1
    blocks = 0
    if low < high:
        blocks = (high - 1) // layer.block_size - low // layer.block_size + 1
        for base in range(low // KEYS * KEYS, high, KEYS):
            begin, end = max(base, low), min(base + KEYS, high)
            if not is_packed(layer, unit):
                stream_tile(layer, scratch, unit, begin, end)
            for i in range(unit.heads):
                head, row = unit.head + i, i * unit.height
                pack_tile(layer, scratch, unit, head, base, begin, end)
                ahead = look_ahead(layer, scratch, unit, i, base + KEYS, high)
                fold_tile(layer, scratch, unit, ahead, head, row, base)
    for i in range(unit.heads):
        finish_rows(layer, scratch, unit, unit.head + i, i * unit.height)
    return blocks * unit.heads


@inner
def bound_rows(layer: Any, scratch: Scratch, unit: Unit) -> None:
    """Write which keys each row sees; the same for every KV head."""
    bound = scratch.bounds
    for token in range(unit.tokens):
        high = unit.high + token
        for _ in range(layer.group):
            store_int64(bound, max(0, high - layer.window))
            store_int64(bound + 8, high)
            bound += 16


@inner
def look_ahead(layer: Any, scratch: Scratch, unit: Unit, i: int, base: int, high: int) -> Ahead:
    """Choose what to prefetch of the tile at ``base`` while head ``i`` of the unit is folded.

    Each of the unit's KV heads takes its share of the tile's keys, all heads of them, as
    far as they lie side by side. Nothing where the tile does not exist or the unit has
    only some of the heads: ``nothing`` is a line that is near anyway.
    """
    key = base + i * KEYS // unit.heads
    nothing = scratch.scores
    if key >= high or unit.heads < layer.num_kv_heads:
        return Ahead(nothing, nothing, nothing, nothing)
    stride = 4 * layer.num_kv_heads * layer.head_dim
    offset = slot_of(layer, unit, key) * stride
    end = offset + (run_end(layer, key, high) - key) * stride - LINE
    return Ahead(
        layer.k_pool + offset, layer.k_pool + end, layer.v_pool + offset, layer.v_pool + end
    )


@inner
def is_packed(layer: Any, unit: Unit) -> bool:
    """Tell whether values are copied side by side: where several register tiles reuse them."""
    packed: bool = unit.tokens * layer.group > ROWS
    return packed


@inner
def start_rows(layer: Any, scratch: Scratch, unit: Unit, head: int, row: int) -> None:
    """Load one KV head's scaled queries to ``row`` on and clear the running state."""
    group = layer.group
    width = 4 * layer.head_dim
    vectors = layer.head_dim // LANES
    for token in range(unit.tokens):
        first = (unit.token + token) * layer.num_q_heads + head * group
        queries = scratch.queries + (row + token * group) * width
        scale_row(queries, layer.q + first * width, group * vectors, layer.query_scale)
    clear(scratch.sums + row * width, unit.tokens * group * vectors)
    for state in range(row, row + unit.tokens * group):
        store_float(scratch.states + 8 * state, np.float32(-np.inf))
        store_float(scratch.states + 8 * state + 4, np.float32(0))


@inner
def slot_of(layer: Any, unit: Unit, key: int) -> int:
    """Return where the key at a position lies: its block's first slot plus its offset."""
    table = layer.block_tables + 4 * unit.sequence * layer.max_blocks
    block = key // layer.block_size
    slot: int = load_int32(table + 4 * block) * layer.block_size + key % layer.block_size
    return slot


@inner
def run_end(layer: Any, key: int, end: int) -> int:
    """Return where the run of keys that lie side by side from ``key`` on stops."""
    stop: int = min(end, (key // layer.block_size + 1) * layer.block_size)
    return stop


@inner
def stream_tile(layer: Any, scratch: Scratch, unit: Unit, begin: int, end: int) -> None:
    """Bring keys and values from ``begin`` to ``end`` near, in the order of memory."""
    width = 4 * layer.head_dim
    stride = width * layer.num_kv_heads
    vectors = unit.heads * layer.head_dim // LANES
    for pool in (layer.k_pool, layer.v_pool):
        key = begin
        while key < end:
            stop = run_end(layer, key, end)
            source = pool + slot_of(layer, unit, key) * stride + unit.head * width
            if unit.heads == layer.num_kv_heads:
                touch(source, (stop - key) * vectors, scratch.scores)
            else:
                for i in range(stop - key):
                    touch(source + i * stride, vectors, scratch.scores)
            key = stop


@inner
def pack_tile(
    layer: Any, scratch: Scratch, unit: Unit, head: int, base: int, begin: int, end: int
) -> None:
    """Transpose one KV head's keys from ``begin`` to ``end`` and copy its values.

    Rows of the last and first strip that are out of the range read zeros.
    """
    width = 4 * layer.head_dim
    stride = width * layer.num_kv_heads
    vectors = layer.head_dim // LANES
    first = (begin - base) // LANES * LANES
    last = (end - base + LANES - 1) // LANES * LANES
    for i in range(first, last):
        store_int64(scratch.sources + 8 * i, scratch.zeros)
    key = begin
    while key < end:
        stop = run_end(layer, key, end)
        offset = slot_of(layer, unit, key) * stride + head * width
        for i in range(key - base, stop - base):
            store_int64(scratch.sources + 8 * i, layer.k_pool + offset)
            if is_packed(layer, unit):
                copy_bytes(scratch.values + width * i, layer.v_pool + offset, width)
            offset += stride
        key = stop
    for i in range(first, last, LANES):
        transpose_strip(scratch.sources + 8 * i, scratch.keys + 4 * i, 4 * KEYS, vectors)


@inner
def seen(scratch: Scratch, i: int, base: int) -> tuple[int, int]:
    """Return the keys, counted from ``base``, that row ``i`` of a head sees of a tile."""
    bound = scratch.bounds + 16 * i
    return max(0, load_int64(bound) - base), min(KEYS, load_int64(bound + 8) - base)


@inner
def fold_tile(
    layer: Any, scratch: Scratch, unit: Unit, ahead: Ahead, head: int, row: int, base: int
) -> None:
    """Fold the packed keys from ``base`` on into the rows of one KV head."""
    rows = unit.tokens * layer.group
    for i in range(0, rows, ROWS):
        count = min(ROWS, rows - i)
        low, _ = seen(scratch, i, base)
        _, high = seen(scratch, i + count - 1, base)
        if low < high:
            score_rows(layer, scratch, ahead, row + i, count, low, high)
            fold_rows(layer, scratch, unit, ahead, head, row, i, count, base)


@inner
def score_rows(
    layer: Any, scratch: Scratch, ahead: Ahead, row: int, count: int, low: int, high: int
) -> None:
    """Multiply up to ``ROWS`` rows with the packed keys from ``low`` to ``high``."""
    width = 4 * layer.head_dim
    queries = scratch.queries + width * row
    depth, stride = layer.head_dim, 4 * KEYS
    following, last = ahead.keys, ahead.last_key
    for key in range(low // WIDE * WIDE, high, WIDE):
        scores = scratch.scores + 4 * key
        keys = scratch.keys + 4 * key
        if count > 1:
            scores_4(scores, stride, queries, width, keys, stride, depth, following, last)
        else:
            scores_1(scores, stride, queries, width, keys, stride, depth, following, last)
        following += LINE * LINES_AHEAD * depth
    if layer.softcap > 0:
        for i in range(count):
            softcap_tile(scratch.scores + 4 * KEYS * i, layer.softcap)


@inner
def fold_rows(
    layer: Any,
    scratch: Scratch,
    unit: Unit,
    ahead: Ahead,
    head: int,
    row: int,
    i: int,
    count: int,
    base: int,
) -> None:
    """Turn ``count`` rows' scores into weights and add their weighted values.

    Each row takes exactly the keys that it sees, in ascending order: those that all rows
    see go through one register tile. A row that sees none of the tile is left alone.
    """
    width = 4 * layer.head_dim
    sums = scratch.sums + width * (row + i)
    common_low, common_high = 0, KEYS
    for j in range(count):
        low, high = seen(scratch, i + j, base)
        common_low, common_high = max(common_low, low), min(common_high, high)
        if low < high:
            states = scratch.states + 8 * (row + i + j)
            shrink = softmax_tile(scratch.scores + 4 * KEYS * j, low, high, states)
            if shrink != 1:
                scale_row(sums + width * j, sums + width * j, layer.head_dim // LANES, shrink)
    if common_low >= common_high:
        common_low, common_high = KEYS, KEYS
    for j in range(count):
        low, high = seen(scratch, i + j, base)
        if low < min(high, common_low):
            high = min(high, common_low)
            add_values(layer, scratch, unit, ahead, head, sums + width * j, j, 1, base, low, high)
    if common_low < common_high:
        low, high = common_low, common_high
        add_values(layer, scratch, unit, ahead, head, sums, 0, count, base, low, high)
    for j in range(count):
        _, high = seen(scratch, i + j, base)
        if common_high < high:
            low = common_high
            add_values(layer, scratch, unit, ahead, head, sums + width * j, j, 1, base, low, high)


@inner
def add_values(
    layer: Any,
    scratch: Scratch,
    unit: Unit,
    ahead: Ahead,
    head: int,
    sums: int,
    j: int,
    count: int,
    base: int,
    begin: int,
    end: int,
) -> None:
    """Add the weighted values from ``base + begin`` to ``base + end`` to ``count`` rows.

    ``sums`` is the address of the first row, ``j`` its place among the scores.
    """
    width = 4 * layer.head_dim
    weights = scratch.scores + 4 * KEYS * j
    if is_packed(layer, unit):
        values = scratch.values + width * begin
        add_run(sums, width, weights + 4 * begin, values, width, end - begin, count, ahead, 0)
        return
    stride = width * layer.num_kv_heads
    key = base + begin
    while key < base + end:
        stop = run_end(layer, key, base + end)
        values = layer.v_pool + slot_of(layer, unit, key) * stride + head * width
        weight = weights + 4 * (key - base)
        add_run(sums, width, weight, values, stride, stop - key, count, ahead, key - base)
        key = stop


@inner
def add_run(
    sums: int,
    width: int,
    weights: int,
    values: int,
    stride: int,
    keys: int,
    count: int,
    ahead: Ahead,
    done: int,
) -> None:
    """Add ``keys`` weighted values, ``stride`` bytes apart, to ``count`` rows.

    ``done`` keys of the tile came before: so far is the prefetching.
    """
    wide = 4 * WIDE
    following = ahead.values + LINE * LINES_AHEAD * done * (width // wide)
    last = ahead.last_value
    pitch = 4 * KEYS
    column = 0
    while column + wide <= width:
        target, source = sums + column, values + column
        if count > 1:
            values_4_wide(target, width, weights, pitch, source, stride, keys, following, last)
        else:
            values_1_wide(target, width, weights, pitch, source, stride, keys, following, last)
        following += LINE * LINES_AHEAD * keys
        column += wide
    while column < width:
        target, source = sums + column, values + column
        if count > 1:
            values_4(target, width, weights, pitch, source, stride, keys, last, last)
        else:
            values_1(target, width, weights, pitch, source, stride, keys, last, last)
        column += 4 * LANES


@inner
def finish_rows(layer: Any, scratch: Scratch, unit: Unit, head: int, row: int) -> None:
    """Divide one KV head's rows by their softmax sums, sinks included, and write the output.

    A row that saw no key (only a wrong lookup makes one) becomes zeros.
    """
    group = layer.group
    width = 4 * layer.head_dim
    for i in range(unit.tokens * group):
        q_head = head * group + i % group
        largest = load_float(scratch.states + 8 * (row + i))
        total = load_float(scratch.states + 8 * (row + i) + 4)
        factor = np.float32(0)
        if total != 0:
            shrink = np.float32(1)
            if layer.sinks != 0:
                sink = load_float(layer.sinks + 4 * q_head) * LOG2E
                top = max(largest, sink)
                shrink = exp2_scalar(largest - top)
                total = total * shrink + exp2_scalar(sink - top)
            factor = shrink / total
        position = (unit.token + i // group) * layer.num_q_heads + q_head
        sums = scratch.sums + width * (row + i)
        scale_row(layer.out + width * position, sums, layer.head_dim // LANES, factor)


@cache
def attend_rows() -> int:
    """Return the address of ``attend`` in C's calling convention, compiled or from cache.

    int64 (layer: LAYER *, memory, sequence, head, heads, token, tokens, high); ``memory``
    is the address of the worker's ``scratch_bytes``, zeros before its first use.
    """
    layers = types.CPointer(from_dtype(LAYER))
    signature = types.int64(layers, *[types.int64] * 7)
    compiled = cfunc(signature, cache=True, error_model="numpy")(_attend_rows)
    return int(compiled.address)


def _attend_rows(
    layers: Any,
    memory: int,
    sequence: int,
    head: int,
    heads: int,
    token: int,
    tokens: int,
    high: int,
) -> int:
    layer = carray(layers, 1)[0]
    rows = tokens * layer.group
    height = (rows + ROWS - 1) // ROWS * ROWS
    scratch = carve(memory, heads * height, layer.head_dim)
    return attend(layer, scratch, Unit(sequence, head, heads, token, tokens, high, height))
