"""Work units of products, quantisations and embeddings: compiled functions, and their launch.

A unit is a share of a product's, a quantisation's or an embedding's work. Its function is called by
address, both by ``launch`` and by the replay of a captured graph. So it is compiled once, when a
model first needs it, and both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import prange, types
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.matmul import int8_matmul
from labkit.cpu.matmul.gemm import (
    BLOCK_ROWS,
    MIN_PARALLEL_FMAS,
    PANEL_COLUMNS,
    WEIGHT_COST,
    multiply_panels,
    take_packed_row,
)
from labkit.cpu.matmul.microkernels import ROW_PANELS
from labkit.cpu.matmul.quantized_matmul import (
    MAX_FUSED_ROWS,
    NUM_FUNCTIONS,
    call_function,
    multiply_task,
    take_row,
)
from labkit.cpu.matmul.quantized_weights import SPAN_COLUMNS, SPAN_PANELS
from labkit.cpu.runtime import thread_pool
from labkit.cpu.runtime.address_intrinsics import (
    byte_array,
    float_array,
    int32_array,
    int64_array,
    stack_words,
    struct_at,
)
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.runtime.jit import c_function, inlined, inner, num_threads
from labkit.cpu.simd.simd_emitter import FLOAT_BYTES, I64, Emitter, emitted

# Units per thread of a large matrix product. The more units, the less work a suspended thread
# delays.
UNITS_PER_THREAD = 4
# A product that costs at least this much is divided into ``UNITS_PER_THREAD`` units per thread, a
# cheaper one into one unit per thread. The cost is counted in multiplications; reading a weight
# counts as ``WEIGHT_COST``. Cheap products stay whole because the first reads of a unit are not
# prefetched: with more units, these reads took a tenth of a step.
LARGE_PRODUCT = 1 << 27
# Bytes of weights that are prefetched before a unit begins. The product itself prefetches the rest.
PREFETCHED_BYTES = 8192
PREFETCH_STRIDE = 4 * CACHE_LINE_BYTES  # bytes that one call of ``_prefetch`` covers
MATMULS = (graph_ops.MATMUL, graph_ops.LOW_PRECISION_MATMUL, graph_ops.INT8_MATMUL)


def params_at(op: int, name: str) -> Any:
    """Return the intrinsic of ``struct_at`` for the parameters of an operation."""
    return struct_at(name, graph_ops.PARAMS[op])


_packed_embedding_at = params_at(graph_ops.PACKED_EMBEDDING, "PackedEmbedding")
_low_precision_embedding_at = params_at(graph_ops.LOW_PRECISION_EMBEDDING, "LowPrecisionEmbedding")
matmul_at = params_at(graph_ops.MATMUL, "Matmul")
_low_precision_matmul_at = params_at(graph_ops.LOW_PRECISION_MATMUL, "LowPrecisionMatmul")
_quantize_at = params_at(graph_ops.QUANTIZE, "Quantize")
_int8_matmul_at = params_at(graph_ops.INT8_MATMUL, "Int8Matmul")


@emitted()
def _prefetch(code: Emitter, address: Any) -> None:
    """Prefetch ``PREFETCH_STRIDE`` bytes from an address on."""
    for line in range(0, PREFETCH_STRIDE, CACHE_LINE_BYTES):
        code.prefetch(code.builder.add(address, I64(line)))


@inner
def num_units(op: int, params: int, rows: int, workers: int) -> int:
    """Return the number of units into which a node of this module is divided.

    This is 1 if handing work to other threads would take longer than the work itself. ``params``
    is the address of the node's parameters, ``rows`` the number of rows of the step.
    """
    units = rows
    if op in MATMULS:
        matmul = matmul_at(params)  # the same fields come first in the other products
        cost = matmul.num_panels * PANEL_COLUMNS * matmul.depth * (rows + WEIGHT_COST)
        most = workers * (1 if cost < LARGE_PRODUCT else UNITS_PER_THREAD)
        tasks = _num_tasks(op, matmul.num_panels, rows)
        units = 1 if cost < MIN_PARALLEL_FMAS else min(tasks, most)
    elif op == graph_ops.QUANTIZE:
        units = 1 if rows * _quantize_at(params).depth < int8_matmul.MIN_PARALLEL_NUMBERS else rows
    return units


@inner
def _num_tasks(op: int, num_panels: int, rows: int) -> int:
    if op != graph_ops.MATMUL:
        return num_panels // SPAN_PANELS if rows <= MAX_FUSED_ROWS else num_panels
    return num_panels * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS)


@inner
def share(unit: int, units: int, count: int) -> tuple[int, int]:
    """Return a unit's share of ``count`` items: the first index and the end (exclusive)."""
    return count * unit // units, count * (unit + 1) // units


@inlined
def _result(params: int, rows: int) -> Any:
    """Return the arrays of a product's result (flat), its biases and its columns."""
    matmul = matmul_at(params)  # the same fields come first in the other products
    out = float_array(matmul.out, rows * matmul.out_width)
    bias = float_array(matmul.bias, matmul.num_panels * PANEL_COLUMNS)
    return out, bias, int64_array(matmul.columns, (matmul.num_panels, 3))


@inlined
def _prefetch_spans(weights: int, span_bytes: int, first: int, rows: int) -> None:
    """Prefetch the spans of a unit that begins with task ``first``."""
    if rows <= MAX_FUSED_ROWS:
        for offset in range(0, PREFETCHED_BYTES, PREFETCH_STRIDE):
            _prefetch(weights + first * span_bytes + offset)


def _float_unit(op, params, unit, units, rows, launches, slots):  # type: ignore[no-untyped-def]
    if op == graph_ops.MATMUL:
        matmul = matmul_at(params)
        x = float_array(matmul.x, (rows, matmul.depth))
        out, bias, columns = _result(params, rows)
        panels = float_array(matmul.weights, (matmul.num_panels, matmul.depth, PANEL_COLUMNS))
        first, end = share(unit, units, _num_tasks(op, matmul.num_panels, rows))
        while first < end:
            panel, block = first % matmul.num_panels, first // matmul.num_panels
            last = min(end, first + (ROW_PANELS if rows == 1 else 1))
            multiply_panels(panel, panel + last - first, block, x, panels, bias, columns, out)
            first = last
    else:
        packed = _packed_embedding_at(params)
        panels = float_array(packed.weights, (packed.num_panels, packed.width, PANEL_COLUMNS))
        first, end = share(unit, units, rows)
        for row in range(first, end):
            token = int(int32_array(packed.token_ids, end)[row])
            out = float_array(packed.out + 4 * row * packed.width, packed.width)
            take_packed_row(token, panels, out)


def _low_precision_unit(op, params, unit, units, rows, launches, slots):  # type: ignore[no-untyped-def]
    if op == graph_ops.LOW_PRECISION_MATMUL:
        matmul = _low_precision_matmul_at(params)
        x = float_array(matmul.x, (rows, matmul.depth))
        out, bias, columns = _result(params, rows)
        functions = int64_array(matmul.functions, NUM_FUNCTIONS)
        first, end = share(unit, units, _num_tasks(op, matmul.num_panels, rows))
        spans = byte_array(matmul.weights, (matmul.num_panels // SPAN_PANELS, matmul.span_bytes))
        _prefetch_spans(matmul.weights, matmul.span_bytes, first, rows)
        for task in range(first, end):
            multiply_task(
                task, functions, matmul.records, matmul.packs, x, spans, bias, columns, out
            )
    else:
        matrix = _low_precision_embedding_at(params)
        functions = int64_array(matrix.functions, NUM_FUNCTIONS)
        first, end = share(unit, units, rows)
        for row in range(first, end):
            token = int(int32_array(matrix.token_ids, end)[row])
            out = float_array(matrix.out + 4 * row * matrix.width, matrix.width)
            spans = byte_array(matrix.weights, (token // SPAN_COLUMNS + 1, matrix.span_bytes))
            take_row(token, functions, matrix.records, matrix.packs, spans, out)


def _int8_unit(op, params, unit, units, rows, launches, slots):  # type: ignore[no-untyped-def]
    if op == graph_ops.QUANTIZE:
        quantize = _quantize_at(params)
        first, end = share(unit, units, rows)
        x = float_array(quantize.x, (end, quantize.depth))
        target = byte_array(quantize.out, (end, quantize.row_bytes))
        functions = int64_array(quantize.functions, int8_matmul.NUM_FUNCTIONS)
        for row in range(first, end):
            int8_matmul.quantize_task(row, functions, quantize.groups, x, target)
    else:
        matmul = _int8_matmul_at(params)
        quantized = byte_array(matmul.x, (rows, matmul.row_bytes))
        out, bias, columns = _result(params, rows)
        functions = int64_array(matmul.functions, int8_matmul.NUM_FUNCTIONS)
        first, end = share(unit, units, _num_tasks(op, matmul.num_panels, rows))
        spans = byte_array(matmul.weights, (matmul.num_panels // SPAN_PANELS, matmul.span_bytes))
        _prefetch_spans(matmul.weights, matmul.span_bytes, first, rows)
        for task in range(first, end):
            int8_matmul.multiply_task(
                task, functions, matmul.groups, matmul.group_bytes, quantized, spans, bias,
                columns, out,
            )  # fmt: skip


_FUNCTIONS = {
    graph_ops.MATMUL: _float_unit,
    graph_ops.PACKED_EMBEDDING: _float_unit,
    graph_ops.LOW_PRECISION_MATMUL: _low_precision_unit,
    graph_ops.LOW_PRECISION_EMBEDDING: _low_precision_unit,
    graph_ops.QUANTIZE: _int8_unit,
    graph_ops.INT8_MATMUL: _int8_unit,
}


@cache
def compile_unit(function: Any) -> int:
    """Compile a unit function (or load it from numba's cache) and return its address.

    The function is a C function ``void (op, params, unit, units, rows, launches, slots)`` of int64:

    - the node's operation code, and the address of its parameters;
    - the index of the unit, and the number of units of the node;
    - the number of rows of the step;
    - for ``STORE_KV`` only, the address of an array of ``LAUNCH`` structs
      (``graph_attention_structs``), and that of int64 [rows], the KV pool slots of the new keys and
      values.
    """
    signature = types.void(*[types.int64] * 7)
    return int(c_function(signature)(function).address)


def unit_address(op: int) -> int | None:
    """Return the address of an operation's unit function, or None if it is not in this module."""
    return compile_unit(_FUNCTIONS[op]) if op in _FUNCTIONS else None


@inner
def _set_params(params: int, words: NDArray[np.int64], x: NDArray[Any], out: NDArray[Any]) -> None:
    """Write a node's parameters: ``out`` and the input come first in each of them."""
    target = int64_array(params, len(words))
    for i in range(len(words)):
        target[i] = words[i]
    target[0], target[1] = out.ctypes.data, x.ctypes.data


@thread_pool.kernel("void(int64, int64, int64[::1], float32[:, ::1], float32[::1])")
def launch(function, op, words, x, out):  # type: ignore[no-untyped-def]
    """Run all units of a node, whose parameters are ``words`` and the addresses of x and out."""
    rows, params = x.shape[0], stack_words(words.size)
    _set_params(params, words, x, out)
    units = num_units(op, params, rows, num_threads())
    if units == 1:
        call_function(function, (op, params, 0, 1, rows, 0, 0))
    else:
        for unit in prange(units):
            call_function(function, (op, params, unit, units, rows, 0, 0))


# Computes an operation for x [rows, ...], and writes the result to a flat array. Both are float32
# or viewed as such.
Product = Callable[[NDArray[Any], NDArray[Any]], None]


def product(op: int, params: dict[str, int]) -> Product:
    """Return an operation with its constant parameters as a function that launches its units.

    The caller keeps alive what the parameters are addresses of.
    """
    words = np.zeros(graph_ops.num_words(op), np.int64)
    for name, value in params.items():
        words[graph_ops.word_of(op, name)] = value
    return partial(launch, compile_unit(_FUNCTIONS[op]), op, words)


def int8_product(quantize: dict[str, int], matmul: dict[str, int]) -> Product:
    """Return a product that quantises its input, given the constant parameters of its two nodes."""
    first, second = product(graph_ops.QUANTIZE, quantize), product(graph_ops.INT8_MATMUL, matmul)
    width = quantize["row_bytes"] // FLOAT_BYTES

    def multiply(x: NDArray[Any], out: NDArray[Any]) -> None:
        quantized = np.empty((len(x), width), np.float32)
        first(x, quantized.reshape(-1))
        second(quantized, out)

    return multiply
