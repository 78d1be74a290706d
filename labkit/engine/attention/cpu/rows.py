"""What the decode and the tiled kernel share: the layer, the scratch and its rows.

Rows are the query heads of a KV head for consecutive tokens of one sequence,
token-major, so that every load of a key or value serves them all. Keys are walked in
tiles of ``KEYS``, aligned to position 0 of the sequence, with online softmax in base 2.
A row's result depends on nothing but its own query and keys: not on the kernel, the
batch, the rows beside it or the block size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
        ("pitch", np.int64),  # query heads from one KV head to the next
        ("group", np.int64),  # how many of them a unit serves
        ("head_dim", np.int64),
        ("block_size", np.int64),
        ("window", np.int64),
        ("query_scale", np.float32),
        ("softcap", np.float32),  # in base 2; 0: off
        ("window_skip", np.int64),  # 0: keys before the window are read and masked
        ("partition", np.int64),  # this unit's share of the keys
        ("partitions", np.int64),
        ("partial_sums", np.int64),  # float32 [total_q, num_q_heads, partitions, head_dim]
        ("partial_states", np.int64),  # float32 [total_q, num_q_heads, partitions, 2]
    ]
)


class Scratch(NamedTuple):
    """One worker's memory: addresses (bytes) of its parts, float32 but for ``sources``.

    ``rows`` counts the rows of all the unit's KV heads, each head's rounded up to whole
    register tiles.
    """

    queries: int  # [rows, head_dim], scaled
    sums: int  # [rows, head_dim], weighted values
    scores: int  # [rows, KEYS]
    keys: int  # [heads, head_dim, KEYS], a tile transposed
    values: int  # [KEYS, head_dim], a tile side by side
    states: int  # [rows, 2], running maximum and sum
    zeros: int  # [MAX_HEAD_DIM]
    sources: int  # int64 [KEYS], addresses of a tile's keys


def scratch_bytes(rows: int, heads: int, head_dim: int) -> int:
    """Return the bytes of a worker's scratch for ``rows`` rows of each of ``heads`` KV heads."""
    rows = -(-rows // ROWS) * ROWS * heads
    floats = rows * (2 * head_dim + KEYS + 2) + (heads + 1) * head_dim * KEYS + MAX_HEAD_DIM
    return -(-(4 * floats + 8 * KEYS) // LINE) * LINE


@inner
def carve(memory: int, rows: int, heads: int, head_dim: int) -> Scratch:
    """Divide a worker's memory; the zeros lie first, so that nothing else ever lies there."""
    sources = memory + 4 * MAX_HEAD_DIM
    queries = sources + 8 * KEYS
    sums = queries + 4 * rows * head_dim
    scores = sums + 4 * rows * head_dim
    keys = scores + 4 * rows * KEYS
    values = keys + 4 * heads * head_dim * KEYS
    states = values + 4 * head_dim * KEYS
    return Scratch(queries, sums, scores, keys, values, states, memory, sources)


@inner
def whole_tiles(rows: int) -> int:
    """Return ``rows`` rounded up to whole register tiles."""
    return (rows + ROWS - 1) // ROWS * ROWS


@inner
def stride_of(layer: Any) -> int:
    """Return the bytes from one key to the next one of its block."""
    stride: int = 4 * layer.num_kv_heads * layer.head_dim
    return stride


@inner
def offset_of(layer: Any, sequence: int, key: int) -> int:
    """Return the bytes from a pool's start to the key at a position of a sequence."""
    table = layer.block_tables + 4 * sequence * layer.max_blocks
    block = key // layer.block_size
    slot = load_int32(table + 4 * block) * layer.block_size + key - block * layer.block_size
    offset: int = slot * stride_of(layer)
    return offset


@inner
def run_end(layer: Any, key: int, end: int) -> int:
    """Return where the run of keys that lie side by side from ``key`` on stops."""
    stop: int = min(end, (key // layer.block_size + 1) * layer.block_size)
    return stop


@inner
def start_rows(layer: Any, scratch: Scratch, head: int, row: int, token: int, tokens: int) -> None:
    """Load one KV head's scaled queries to ``row`` on and clear the running state."""
    width = 4 * layer.head_dim
    vectors = layer.head_dim // LANES
    for i in range(tokens):
        first = (token + i) * layer.num_q_heads + head * layer.pitch
        queries = scratch.queries + (row + i * layer.group) * width
        scale_row(queries, layer.q + first * width, layer.group * vectors, layer.query_scale)
    clear(scratch.sums + row * width, tokens * layer.group * vectors)
    for state in range(row, row + tokens * layer.group):
        store_float(scratch.states + 8 * state, np.float32(-np.inf))
        store_float(scratch.states + 8 * state + 4, np.float32(0))


@inner
def pack_keys(
    layer: Any,
    scratch: Scratch,
    head: int,
    keys: int,
    sequence: int,
    base: int,
    begin: int,
    end: int,
) -> None:
    """Transpose one KV head's keys from ``begin`` to ``end`` to their columns of a tile.

    ``keys`` is the tile's address, ``base`` its first key. Columns of the first and last
    strip that are out of the range become zeros.
    """
    first = (begin - base) // LANES * LANES
    last = (end - base + LANES - 1) // LANES * LANES
    for i in range(first, last):
        store_int64(scratch.sources + 8 * i, scratch.zeros)
    key = begin
    while key < end:
        stop = run_end(layer, key, end)
        source = layer.k_pool + offset_of(layer, sequence, key) + 4 * head * layer.head_dim
        for i in range(key - base, stop - base):
            store_int64(scratch.sources + 8 * i, source)
            source += stride_of(layer)
        key = stop
    vectors = layer.head_dim // LANES
    for i in range(first, last, LANES):
        transpose_strip(scratch.sources + 8 * i, keys + 4 * i, 4 * KEYS, vectors)


@inner
def score_rows(
    layer: Any,
    scratch: Scratch,
    keys: int,
    row: int,
    count: int,
    low: int,
    high: int,
    ahead: int,
    last: int,
) -> None:
    """Multiply up to ``ROWS`` rows with a tile's keys from ``low`` to ``high``.

    Meanwhile memory from ``ahead`` to ``last`` is prefetched.
    """
    width = 4 * layer.head_dim
    queries = scratch.queries + width * row
    depth, pitch = layer.head_dim, 4 * KEYS
    for key in range(low // WIDE * WIDE, high, WIDE):
        scores = scratch.scores + pitch * row + 4 * key
        columns = keys + 4 * key
        if count > 1:
            scores_4(scores, pitch, queries, width, columns, pitch, depth, ahead, last)
        else:
            scores_1(scores, pitch, queries, width, columns, pitch, depth, ahead, last)
        ahead += LINE * LINES_AHEAD * depth
    if layer.softcap > 0:
        for i in range(row, row + count):
            softcap_tile(scratch.scores + pitch * i, layer.softcap)


@inner
def weigh_row(layer: Any, scratch: Scratch, row: int, low: int, high: int) -> None:
    """Turn a row's scores from ``low`` to ``high`` (at least one) into weights."""
    shrink = softmax_tile(scratch.scores + 4 * KEYS * row, low, high, scratch.states + 8 * row)
    if shrink != 1:
        sums = scratch.sums + 4 * layer.head_dim * row
        scale_row(sums, sums, layer.head_dim // LANES, shrink)


@inner
def add_values(
    layer: Any,
    scratch: Scratch,
    row: int,
    count: int,
    first: int,
    keys: int,
    values: int,
    stride: int,
    ahead: int,
    last: int,
) -> int:
    """Add a tile's weighted values from key ``first`` on to ``count`` rows.

    ``values`` is the address of the first, the others follow ``stride`` bytes apart.
    Meanwhile memory from ``ahead`` to ``last`` is prefetched; returns how far it came.
    """
    width = 4 * layer.head_dim
    sums = scratch.sums + width * row
    weights = scratch.scores + 4 * KEYS * row + 4 * first
    pitch = 4 * KEYS
    column = 0
    while column + 4 * WIDE <= width:
        target, source = sums + column, values + column
        if count > 1:
            values_4_wide(target, width, weights, pitch, source, stride, keys, ahead, last)
        else:
            values_1_wide(target, width, weights, pitch, source, stride, keys, ahead, last)
        ahead += LINE * LINES_AHEAD * keys
        column += 4 * WIDE
    while column < width:
        target, source = sums + column, values + column
        if count > 1:
            values_4(target, width, weights, pitch, source, stride, keys, last, last)
        else:
            values_1(target, width, weights, pitch, source, stride, keys, last, last)
        column += 4 * LANES
    return ahead


@inner
def finish_rows(layer: Any, scratch: Scratch, head: int, row: int, token: int, tokens: int) -> None:
    """Divide one KV head's rows by their softmax sums, sinks included, and write the output.

    A row that saw no key (only a wrong lookup makes one) becomes zeros.
    """
    width = 4 * layer.head_dim
    for i in range(tokens * layer.group):
        q_head = head * layer.pitch + i % layer.group
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
        position = (token + i // layer.group) * layer.num_q_heads + q_head
        sums = scratch.sums + width * (row + i)
        scale_row(layer.out + width * position, sums, layer.head_dim // LANES, factor)


@inner
def keep_rows(layer: Any, scratch: Scratch, head: int, row: int, token: int) -> None:
    """Leave one KV head's rows of one token, unfinished, to the kernel that merges partitions."""
    width = 4 * layer.head_dim
    first = token * layer.num_q_heads + head * layer.pitch
    for i in range(layer.group):
        part = (first + i) * layer.partitions + layer.partition
        copy_bytes(layer.partial_sums + width * part, scratch.sums + width * (row + i), width)
        copy_bytes(layer.partial_states + 8 * part, scratch.states + 8 * (row + i), 8)
