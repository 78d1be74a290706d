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
from numba import extending, from_dtype, types

from labkit.engine.attention.elements import STORED_AS
from labkit.engine.cpu.halves import MARKS
from labkit.engine.cpu.intrinsics import (
    KEYS,
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
from labkit.engine.cpu.jit import inlined, inner
from labkit.engine.cpu.simd import LANES, LINE

LOG2E = np.float32(1.4426950408889634)

# One layer's operands and options; arrays by address (bytes), contiguous.
_FIELDS = (
    ("q", np.int64),  # float32 [total_q, num_q_heads, head_dim]
    ("k_pool", np.int64),  # [num_blocks, block_size, num_kv_heads, head_dim]
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
)
# By what the pools hold. The type of ``element``, a number that nobody reads, says it too, so
# that numba compiles every part of a kernel for the pools that it is given.
LAYERS = {
    stored: np.dtype([*_FIELDS, ("element", MARKS[name])], align=True)
    for name, stored in STORED_AS.items()
}
(LAYER_BYTES,) = {layer.itemsize for layer in LAYERS.values()}


class LayerType(types.Record):  # type: ignore[misc]
    """A layer's numba type, whose functions are called the same in every process.

    numba calls those of a record by the number that the type happens to have in its process:
    functions for other pools, compiled in another process and cached, could bear that name.
    """

    @property
    def mangling_args(self) -> tuple[str, tuple[()]]:
        """What tells functions for this type from others."""
        return f"Layer_{self.typeof('element')}", ()


extending.register_model(LayerType)(extending.models.RecordModel)


def layer_type(layer: np.dtype[Any]) -> LayerType:
    """Return the numba type of one of ``LAYERS``."""
    record = from_dtype(layer)
    fields = [(name, field._asdict()) for name, field in record.fields.items()]
    return LayerType(fields, record.size, record.aligned)


class Scratch(NamedTuple):
    """One worker's memory: addresses (bytes) of its parts, float32."""

    queries: int  # [rows, head_dim], scaled
    sums: int  # [rows, head_dim], weighted values
    scores: int  # [rows, KEYS]
    states: int  # [rows, 2], running maximum and sum
    rest: int  # what a kernel needs besides


def row_bytes(rows: int, head_dim: int) -> int:
    """Return the bytes of so many rows, in whole cache lines."""
    return -(-4 * rows * (2 * head_dim + KEYS + 2) // LINE) * LINE


@inner
def carve(memory: int, rows: int, head_dim: int) -> Scratch:
    """Divide a worker's memory; vectors begin on a cache line."""
    sums = memory + 4 * rows * head_dim
    scores = sums + 4 * rows * head_dim
    states = scores + 4 * rows * KEYS
    rest = states + (8 * rows + LINE - 1) // LINE * LINE
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
    scores = scratch.scores + 4 * KEYS * row
    if layer.softcap > 0:
        softcap_tile(scores, layer.softcap)
    shrink = softmax_tile(scores, low, high, scratch.states + 8 * row)
    if shrink != 1:
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
