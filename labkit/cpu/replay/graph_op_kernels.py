"""Computes the operations of a captured graph, except attention.

A node's work is divided into units, which threads take from a shared counter. A unit calls the same
functions as the operation's own kernel outside a graph, so the results are identical to the bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cfunc, types

from labkit.cpu.attention.attention_launch import KVWrite, write_token_kv
from labkit.cpu.capture import graph_ops
from labkit.cpu.layers import activations, norms, rope
from labkit.cpu.layers.activations import activate
from labkit.cpu.layers.norms import rms_row
from labkit.cpu.layers.rope import rotate_row
from labkit.cpu.layers.top_two_logits import find_candidate, num_parts
from labkit.cpu.matmul import int8_matmul
from labkit.cpu.matmul.gemm import (
    BLOCK_ROWS,
    MIN_PARALLEL_FMAS,
    PANEL_COLUMNS,
    WEIGHT_COST,
    multiply_panels,
    take_packed_row,
)
from labkit.cpu.matmul.low_precision_matmul import MAX_FUSED_ROWS, multiply_task, take_row
from labkit.cpu.matmul.low_precision_weights import SPAN_COLUMNS, SPAN_PANELS
from labkit.cpu.matmul.microkernels import ROW_PANELS
from labkit.cpu.replay.graph_attention_structs import LAUNCH_BYTES, launch_at
from labkit.cpu.runtime.address_views import (
    byte_matrix,
    float_array,
    float_matrix,
    float_panels,
    int32_array,
    int64_array,
    int64_matrix,
    struct_at,
)
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.runtime.jit import inner, intrinsic
from labkit.cpu.simd.simd_emitter import I64, Emitter

# Units per thread of a large matrix product. The more units, the less work a suspended thread
# delays.
UNITS_PER_THREAD = 4
# A product that costs at least this much is divided into ``UNITS_PER_THREAD`` units per thread, a
# cheaper one into one unit per thread. The cost is counted in multiplications; reading a weight
# counts as ``WEIGHT_COST``. Cheap products stay whole because the first reads of a unit are not
# prefetched: with more units, these reads took a tenth of a step.
LARGE_PRODUCT = 1 << 27
ELEMENTWISE_CHUNK = 4 * activations.CHUNK  # elements per unit of ADD, MULTIPLY and SCALE
NUM_FUNCTIONS = 5  # compiled functions per format of low-precision weights
# Bytes of weights that are prefetched before a unit begins. The product itself prefetches the rest.
PREFETCHED_BYTES = 8192
PREFETCH_STRIDE = 4 * CACHE_LINE_BYTES  # bytes that one call of ``_prefetch`` covers
_MATMULS = (graph_ops.MATMUL, graph_ops.LOW_PRECISION_MATMUL, graph_ops.INT8_MATMUL)


def _params_at(op: int, name: str) -> Any:
    return struct_at(name, graph_ops.PARAMS[op])


embedding_at = _params_at(graph_ops.EMBEDDING, "Embedding")
packed_embedding_at = _params_at(graph_ops.PACKED_EMBEDDING, "PackedEmbedding")
low_precision_embedding_at = _params_at(graph_ops.LOW_PRECISION_EMBEDDING, "LowPrecisionEmbedding")
rms_norm_at = _params_at(graph_ops.RMS_NORM, "RMSNorm")
rope_at = _params_at(graph_ops.ROPE, "RoPE")
matmul_at = _params_at(graph_ops.MATMUL, "Matmul")
low_precision_matmul_at = _params_at(graph_ops.LOW_PRECISION_MATMUL, "LowPrecisionMatmul")
quantize_at = _params_at(graph_ops.QUANTIZE, "Quantize")
int8_matmul_at = _params_at(graph_ops.INT8_MATMUL, "Int8Matmul")
activation_at = _params_at(graph_ops.ACTIVATION, "Activation")
elementwise_at = _params_at(graph_ops.ADD, "Elementwise")
scale_at = _params_at(graph_ops.SCALE, "Scale")
store_kv_at = _params_at(graph_ops.STORE_KV, "StoreKV")
attention_at = _params_at(graph_ops.ATTENTION, "Attention")
greedy_at = _params_at(graph_ops.GREEDY, "Greedy")


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch ``PREFETCH_STRIDE`` bytes from an address on."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        for line in range(0, PREFETCH_STRIDE, CACHE_LINE_BYTES):
            code.prefetch(builder.add(arguments[0], I64(line)))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@inner
def num_units(op: int, params: int, rows: int, workers: int) -> int:
    """Return the number of units into which a node's work is divided.

    This is 1 if handing work to other threads would take longer than the work itself. ``params``
    is the address of the node's parameters, ``rows`` the number of rows of the step.
    """
    units = rows
    if op == graph_ops.ATTENTION:
        units = workers
    elif op in _MATMULS:
        matmul = matmul_at(params)  # the same fields come first in the other products
        cost = matmul.num_panels * PANEL_COLUMNS * matmul.depth * (rows + WEIGHT_COST)
        most = workers * (1 if cost < LARGE_PRODUCT else UNITS_PER_THREAD)
        tasks = _num_tasks(op, matmul.num_panels, rows)
        units = 1 if cost < MIN_PARALLEL_FMAS else min(tasks, most)
    elif op == graph_ops.ACTIVATION:
        size, chunk = activation_at(params).size, activations.CHUNK
        units = 1 if size < activations.MIN_PARALLEL_NUMBERS else (size + chunk - 1) // chunk
    elif op in (graph_ops.ADD, graph_ops.MULTIPLY):
        units = (elementwise_at(params).size + ELEMENTWISE_CHUNK - 1) // ELEMENTWISE_CHUNK
    elif op == graph_ops.SCALE:
        units = (scale_at(params).size + ELEMENTWISE_CHUNK - 1) // ELEMENTWISE_CHUNK
    elif op == graph_ops.RMS_NORM:
        norm = rms_norm_at(params)
        units = 1 if norm.num_rows * norm.width < norms.MIN_PARALLEL_NUMBERS else rows
    elif op == graph_ops.QUANTIZE:
        units = 1 if rows * quantize_at(params).depth < int8_matmul.MIN_PARALLEL_NUMBERS else rows
    elif op == graph_ops.GREEDY:
        units = rows * num_parts(greedy_at(params).vocabulary)
    elif op == graph_ops.ROPE:
        rotation = rope_at(params)
        size = rows * rotation.heads * rotation.width
        units = 1 if size < rope.MIN_PARALLEL_NUMBERS else rows
    return units


@inner
def _num_tasks(op: int, num_panels: int, rows: int) -> int:
    if op != graph_ops.MATMUL:
        return num_panels // SPAN_PANELS if rows <= MAX_FUSED_ROWS else num_panels
    step = ROW_PANELS if rows == 1 else 1
    return (num_panels + step - 1) // step * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS)


@inner
def _share(unit: int, units: int, count: int) -> tuple[int, int]:
    """Return a unit's share of ``count`` items: the first index and the end (exclusive)."""
    return count * unit // units, count * (unit + 1) // units


@inner
def _matmul(matmul: Any, rows: int, first: int, end: int) -> None:
    """Compute the tasks of ``gemm.matmul`` from ``first`` to ``end``."""
    x = float_matrix(matmul.x, rows, matmul.depth)
    out = float_array(matmul.out, rows * matmul.out_width)
    bias = float_array(matmul.bias, matmul.num_panels * PANEL_COLUMNS)
    columns = int64_matrix(matmul.columns, matmul.num_panels, 3)
    panels = float_panels(matmul.weights, matmul.num_panels, matmul.depth, PANEL_COLUMNS)
    step = ROW_PANELS if rows == 1 else 1
    groups = (matmul.num_panels + step - 1) // step
    for task in range(first, end):
        multiply_panels(task % groups * step, task // groups, x, panels, bias, columns, out)


@inner
def _low_precision_matmul(matmul: Any, rows: int, first: int, end: int) -> None:
    """Compute the tasks of ``low_precision_matmul.matmul`` from ``first`` to ``end``."""
    x = float_matrix(matmul.x, rows, matmul.depth)
    out = float_array(matmul.out, rows * matmul.out_width)
    bias = float_array(matmul.bias, matmul.num_panels * PANEL_COLUMNS)
    columns = int64_matrix(matmul.columns, matmul.num_panels, 3)
    spans = byte_matrix(matmul.weights, matmul.num_panels // SPAN_PANELS, matmul.span_bytes)
    functions = int64_array(matmul.functions, NUM_FUNCTIONS)
    if rows <= MAX_FUSED_ROWS:
        for offset in range(0, PREFETCHED_BYTES, PREFETCH_STRIDE):
            _prefetch(matmul.weights + first * matmul.span_bytes + offset)
    for task in range(first, end):
        multiply_task(task, functions, matmul.records, matmul.packs, x, spans, bias, columns, out)


@inner
def _quantize(quantize: Any, first: int, end: int) -> None:
    """Quantise the rows from ``first`` to ``end``."""
    x = float_matrix(quantize.x, end, quantize.depth)
    out = byte_matrix(quantize.out, end, quantize.row_bytes)
    functions = int64_array(quantize.functions, int8_matmul.NUM_FUNCTIONS)
    for row in range(first, end):
        int8_matmul.quantize_task(row, functions, quantize.groups, x, out)


@inner
def _int8_matmul(matmul: Any, rows: int, first: int, end: int) -> None:
    """Compute the tasks of ``int8_matmul.matmul`` from ``first`` to ``end``."""
    quantized = byte_matrix(matmul.x, rows, matmul.row_bytes)
    out = float_array(matmul.out, rows * matmul.out_width)
    bias = float_array(matmul.bias, matmul.num_panels * PANEL_COLUMNS)
    columns = int64_matrix(matmul.columns, matmul.num_panels, 3)
    spans = byte_matrix(matmul.weights, matmul.num_panels // SPAN_PANELS, matmul.span_bytes)
    functions = int64_array(matmul.functions, int8_matmul.NUM_FUNCTIONS)
    if rows <= MAX_FUSED_ROWS:
        for offset in range(0, PREFETCHED_BYTES, PREFETCH_STRIDE):
            _prefetch(matmul.weights + first * matmul.span_bytes + offset)
    for task in range(first, end):
        int8_matmul.multiply_task(
            task, functions, matmul.groups, matmul.group_bytes, quantized, spans, bias, columns, out
        )


@inner
def _embed(op: int, params: int, first: int, end: int) -> None:
    """Write the embeddings of the tokens in the rows from ``first`` to ``end``."""
    if op == graph_ops.EMBEDDING:
        table = embedding_at(params)
        for row in range(first, end):
            token = int(int32_array(table.token_ids, end)[row])
            source = float_array(table.weights + 4 * token * table.width, table.width)
            out = float_array(table.out + 4 * row * table.width, table.width)
            for i in range(table.width):
                out[i] = source[i]
    elif op == graph_ops.PACKED_EMBEDDING:
        packed = packed_embedding_at(params)
        panels = float_panels(packed.weights, packed.num_panels, packed.width, PANEL_COLUMNS)
        for row in range(first, end):
            token = int(int32_array(packed.token_ids, end)[row])
            out = float_array(packed.out + 4 * row * packed.width, packed.width)
            take_packed_row(token, panels, out)
    else:
        matrix = low_precision_embedding_at(params)
        functions = int64_array(matrix.functions, NUM_FUNCTIONS)
        for row in range(first, end):
            token = int(int32_array(matrix.token_ids, end)[row])
            out = float_array(matrix.out + 4 * row * matrix.width, matrix.width)
            spans = byte_matrix(matrix.weights, token // SPAN_COLUMNS + 1, matrix.span_bytes)
            take_row(token, functions, matrix.records, matrix.packs, spans, out)


@inner
def _rotate(rotation: Any, first: int, end: int) -> None:
    """Apply RoPE to the rows from ``first`` to ``end``."""
    heads, width = rotation.heads, rotation.width
    x = float_matrix(rotation.x, end * heads, width)
    out = float_matrix(rotation.out, end * heads, width)
    positions = int32_array(rotation.positions, end)
    # The tables' true length is not needed here, because all positions are known to be in them.
    cos = float_matrix(rotation.cos, 1 << 30, rotation.half)
    sin = float_matrix(rotation.sin, 1 << 30, rotation.half)
    scale, traditional = np.float32(rotation.input_scale), rotation.traditional != 0
    for token in range(first, end):
        for head in range(heads):
            row, position = token * heads + head, positions[token]
            rotate_row(x, row, cos, sin, position, scale, traditional, out)


@inner
def _activate(activation: Any, first: int, end: int) -> None:
    """Compute the activations of the elements from ``first`` to ``end``."""
    size, offset = end - first, 4 * first
    x, gate = float_array(activation.x + offset, size), float_array(activation.gate + offset, size)
    activate(activation.kind, x, gate, float_array(activation.out + offset, size))


@inner
def _elementwise(op: int, operands: Any, first: int, end: int) -> None:
    """Add or multiply the elements of two arrays from ``first`` to ``end``."""
    size, offset = end - first, 4 * first
    a, b = float_array(operands.a + offset, size), float_array(operands.b + offset, size)
    out = float_array(operands.out + offset, size)
    if op == graph_ops.ADD:
        for i in range(size):
            out[i] = a[i] + b[i]
    else:
        for i in range(size):
            out[i] = a[i] * b[i]


@inner
def _scale(operands: Any, first: int, end: int) -> None:
    """Multiply the elements of an array from ``first`` to ``end`` by a number."""
    size, offset, factor = end - first, 4 * first, np.float32(operands.factor)
    a, out = float_array(operands.a + offset, size), float_array(operands.out + offset, size)
    for i in range(size):
        out[i] = a[i] * factor


@inner
def _normalize(norm: Any, first: int, end: int) -> None:
    """Apply RMSNorm to the rows from ``first`` to ``end``."""
    width, weights = norm.width, float_array(norm.weights, norm.width)
    for row in range(first, end):
        offset = 4 * row * width
        x, out = float_array(norm.x + offset, width), float_array(norm.out + offset, width)
        rms_row(x, weights, norm.eps, out)


@inner
def _store_kv(store: Any, launches: int, slots: int, first: int, end: int) -> None:
    """Write the keys and values of the rows from ``first`` to ``end`` to the KV pools."""
    launch = launch_at(launches + store.launch * LAUNCH_BYTES)
    write = KVWrite(
        launch.pool_dtype, store.k, store.v, launch.k_pool, launch.v_pool,
        int64_array(slots, end), launch.token_numbers,
    )  # fmt: skip
    for token in range(first, end):
        write_token_kv(write, token)


@inner
def _compute(
    op: int, params: int, unit: int, units: int, rows: int, launches: int, slots: int
) -> None:
    if op in _MATMULS:
        first, end = _share(unit, units, _num_tasks(op, matmul_at(params).num_panels, rows))
        if op == graph_ops.MATMUL:
            _matmul(matmul_at(params), rows, first, end)
        elif op == graph_ops.INT8_MATMUL:
            _int8_matmul(int8_matmul_at(params), rows, first, end)
        else:
            _low_precision_matmul(low_precision_matmul_at(params), rows, first, end)
    elif op in (graph_ops.ADD, graph_ops.MULTIPLY):
        first, end = _share(unit, units, elementwise_at(params).size)
        _elementwise(op, elementwise_at(params), first, end)
    elif op == graph_ops.SCALE:
        first, end = _share(unit, units, scale_at(params).size)
        _scale(scale_at(params), first, end)
    elif op == graph_ops.ACTIVATION:
        first, end = _share(unit, units, activation_at(params).size)
        _activate(activation_at(params), first, end)
    elif op == graph_ops.RMS_NORM:
        first, end = _share(unit, units, rms_norm_at(params).num_rows)
        _normalize(rms_norm_at(params), first, end)
    elif op == graph_ops.GREEDY:
        greedy = greedy_at(params)
        find_candidate(greedy.logits, greedy.vocabulary, unit, greedy.out)
    else:
        first, end = _share(unit, units, rows)
        if op == graph_ops.ROPE:
            _rotate(rope_at(params), first, end)
        elif op == graph_ops.QUANTIZE:
            _quantize(quantize_at(params), first, end)
        elif op == graph_ops.STORE_KV:
            _store_kv(store_kv_at(params), launches, slots, first, end)
        else:
            _embed(op, params, first, end)


def compute_unit(op, params, unit, units, rows, launches, slots):  # type: ignore[no-untyped-def]
    """Compute one unit of a node. Compiled once, and called by address from every ``replay``.

    Parameters
    ----------
    op, params
        The node's operation code, and the address of its parameters.
    unit, units
        The index of the unit, and the number of units of the node.
    rows
        Number of rows of the step.
    launches, slots
        Used by ``STORE_KV`` only: the address of an array of ``LAUNCH`` structs
        (``graph_attention_structs``), and the address of int64 [rows], the KV pool slots of the
        new keys and values.
    """
    _compute(op, params, unit, units, rows, launches, slots)
    return 0


@cache
def compute_unit_address() -> int:
    """Compile ``compute_unit`` (or load it from numba's cache) and return its address."""
    signature = types.int64(*[types.int64] * 7)
    return int(cfunc(signature, cache=True, error_model="numpy")(compute_unit).address)
