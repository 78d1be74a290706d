"""What the decode and the tiled kernel share: the scratch and its rows.

Rows are the query heads of a KV head for consecutive tokens of one sequence,
token-major, so that every load of a key or value serves them all. Keys are walked in
tiles of ``TILE_KEYS``, aligned to position 0 of the sequence, with online softmax in base 2.
A row's result depends on nothing but its own query and keys: not on the kernel, the
batch, the rows beside it or the block size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from labkit.cpu.attention_intrinsics import (
    TILE_KEYS,
    clear,
    copy_bytes,
    element_bytes,
    exp2_scalar,
    load_float,
    load_int32,
    scale_row,
    softcap_tile,
    softmax_tile,
    store_float,
)
from labkit.cpu.jit import inlined, inner
from labkit.cpu.simd_emitter import CACHE_LINE_BYTES, LOG2E
from labkit.cpu.vector_registers import LANES

_LOG2E = np.float32(LOG2E)


class Scratch(NamedTuple):
    """One worker's memory: addresses (bytes) of its parts, float32."""

    queries: int  # [rows, head_dim], scaled
    sums: int  # [rows, head_dim], weighted values
    scores: int  # [rows, KEYS]
    states: int  # [rows, 2], running maximum and sum
    rest: int  # what a kernel needs besides


def row_bytes(rows: int, head_dim: int) -> int:
    """Return the bytes of so many rows, in whole cache lines."""
    return -(-4 * rows * (2 * head_dim + TILE_KEYS + 2) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


@inner
def carve(memory: int, rows: int, head_dim: int) -> Scratch:
    """Divide a worker's memory; vectors begin on a cache line."""
    sums = memory + 4 * rows * head_dim
    scores = sums + 4 * rows * head_dim
    states = scores + 4 * rows * TILE_KEYS
    rest = states + (8 * rows + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES
    return Scratch(memory, sums, scores, states, rest)


@inlined
def head_bytes(layer: Any) -> int:
    """Return the bytes of one head of a key or value in the pools."""
    size: int = element_bytes(layer) * layer.head_dim
    return size


@inlined
def stride_of(layer: Any) -> int:
    """Return the bytes from one key to the next one of its block."""
    stride: int = layer.num_kv_heads * head_bytes(layer)
    return stride


@inlined
def offset_of(layer: Any, sequence: int, key: int) -> int:
    """Return the bytes from a pool's start to the key at a position of a sequence."""
    table = layer.block_tables + 4 * sequence * layer.max_blocks
    block = key // layer.block_size
    slot = load_int32(table + 4 * block) * layer.block_size + key - block * layer.block_size
    offset: int = slot * stride_of(layer)
    return offset


@inlined
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
def weigh_row(layer: Any, scratch: Scratch, row: int, low: int, high: int) -> None:
    """Turn a row's scores from ``low`` to ``high`` (at least one) into weights."""
    scores = scratch.scores + 4 * TILE_KEYS * row
    if layer.softcap > 0:
        softcap_tile(scores, layer.softcap)
    shrink = softmax_tile(scores, low, high, scratch.states + 8 * row)
    # By 1 too: a branch on what is computed last would cost more than the row.
    sums = scratch.sums + 4 * layer.head_dim * row
    scale_row(sums, sums, layer.head_dim // LANES, shrink)


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
                sink = load_float(layer.sinks + 4 * q_head) * _LOG2E
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
