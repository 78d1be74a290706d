"""The matrix product of int8 activations with 4- or 8-bit weights: x[M, K] @ W[N, K].T + bias.

x is quantised row by row (``int8_microkernels``). Weights are read directly from the spans of
``quantized_matmul``. Every output element starts with the bias, and each quantisation group
adds two terms to it, in order, with one rounding each::

    fma(sum(integer * activation), scale * activation_scale, previous)
    fma(bias, activation_scale * sum(activation), previous)

The sums of integers are exact (``int8_dot``), so the bits of a row depend neither on the other rows
nor on the CPU. ``int8_matmul_self_test`` computes the same bits in NumPy.

If there are only a few rows, they are multiplied by a span one after the other, while the span
stays in the caches. With more rows, a panel is first unpacked into a buffer and then multiplied in
register tiles (``int8_microkernels``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from labkit.cpu.matmul.gemm import PANEL_COLUMNS
from labkit.cpu.matmul.int8_microkernels import (
    FORMATS,
    TILE_ROWS,
    Int8Format,
    Int8TileCall,
    QuantizeCall,
    RowCall,
    UnpackCall,
    multiply_row,
    multiply_tile,
    quantize_row,
    unpack_panel,
)
from labkit.cpu.matmul.microkernels import PANEL_ROW_BYTES
from labkit.cpu.matmul.quantized_matmul import MAX_FUSED_ROWS, call_function, compile_function
from labkit.cpu.matmul.quantized_weights import SPAN_COLUMNS, SPAN_PANELS
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.runtime.numba_pipelines import INNER
from labkit.cpu.simd.simd_emitter import FLOAT_BYTES

MAX_SINGLE_ROWS = 3  # up to this number, rows are multiplied one by one
# Quantising fewer numbers takes less time than handing work to other threads.
MIN_PARALLEL_NUMBERS = 1 << 14
# The compiled functions of a format, as indices of ``Int8Functions.addresses``.
QUANTIZE, ROW, UNPACK, TILE = range(4)
NUM_FUNCTIONS = 4


@dataclass(frozen=True, slots=True)
class Int8Functions:
    """The compiled functions of a format.

    ``addresses`` is an int64 array, indexed by ``QUANTIZE`` to ``TILE``. ``compiled`` keeps the
    functions themselves alive.
    """

    addresses: NDArray[np.int64]
    spec: Int8Format
    compiled: tuple[Any, ...]

    def row_bytes(self, depth: int) -> int:
        """Return the bytes of a quantised row of ``depth`` activations."""
        groups = depth // self.spec.group_size
        return groups * (self.spec.activations_bytes + self.spec.header_bytes)


@cache
def int8_functions(element: str, bits: int, group_size: int) -> Int8Functions:
    """Compile the functions of a format, or load them from numba's cache.

    ``element`` is the type of scales and biases. ``bits`` is 4 or 8.
    """
    keys = [(spec.element, spec.bits, spec.group_size) for spec in FORMATS]
    return compile_functions(keys.index((element, bits, group_size)))


def compile_functions(index: int) -> Int8Functions:
    """Compile the functions of ``FORMATS[index]``, or load them from numba's cache."""

    def quantize(x, groups, target):  # type: ignore[no-untyped-def]
        quantize_row(index, QuantizeCall(x, groups, target))

    def row(x, groups, span, bias, sums, out):  # type: ignore[no-untyped-def]
        multiply_row(index, RowCall(x, groups, span, bias, sums, out))

    def unpack(span, groups, panel, target):  # type: ignore[no-untyped-def]
        unpack_panel(index, UnpackCall(span, groups, panel, target))

    def tile(x, x_row_bytes, rows, groups, panel, bias, sums, out, out_row_bytes):  # type: ignore[no-untyped-def]
        call = Int8TileCall(x, x_row_bytes, rows, groups, panel, bias, sums, out, out_row_bytes)
        multiply_tile(index, call)

    spec = FORMATS[index]
    compiled = [
        compile_function(function, index, spec.form.name)
        for function in (quantize, row, unpack, tile)
    ]
    addresses = np.array([function.address for function in compiled], np.int64)
    return Int8Functions(addresses, spec, tuple(compiled))


@njit(**INNER)
def aligned_floats(count):  # type: ignore[no-untyped-def]
    """Allocate ``count`` float32 that start on a cache line.

    Return the array that keeps the memory alive, and the address of the first float32.
    """
    memory = np.empty(count + CACHE_LINE_BYTES // FLOAT_BYTES, np.float32)
    address = np.int64(memory.ctypes.data)
    return memory, address + -address % CACHE_LINE_BYTES


@njit(**INNER)
def quantize_task(row, functions, groups, x, quantized):  # type: ignore[no-untyped-def]
    """Quantise row ``row`` of x [M, K]."""
    source, target = x[row].ctypes.data, quantized[row].ctypes.data
    call_function(functions[QUANTIZE], QuantizeCall(source, groups, target))


@njit(**INNER)
def _multiply_span(span, functions, groups, quantized, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply each row by the span, whose weights are unpacked in registers."""
    rows, first_panel = quantized.shape[0], span * SPAN_PANELS
    start, width, column = columns[first_panel, 0], columns[first_panel, 1], columns[first_panel, 2]
    valid = min(SPAN_COLUMNS, width - column)
    span_at = np.int64(spans.ctypes.data) + span * spans.shape[1]
    bias_at = np.int64(bias.ctypes.data) + first_panel * PANEL_ROW_BYTES
    sums, sums_at = aligned_floats(2 * SPAN_COLUMNS)
    spill_at = sums_at + SPAN_COLUMNS * FLOAT_BYTES
    spill = sums[(spill_at - np.int64(sums.ctypes.data)) // FLOAT_BYTES :]
    for row in range(rows):
        target = rows * start + row * width + column
        out_at = np.int64(out.ctypes.data) + target * FLOAT_BYTES
        if valid < SPAN_COLUMNS:
            out_at = spill_at
        x_at = np.int64(quantized[row].ctypes.data)
        call_function(functions[ROW], RowCall(x_at, groups, span_at, bias_at, sums_at, out_at))
        if valid < SPAN_COLUMNS:
            for j in range(valid):
                out[target + j] = spill[j]
    sums[0] = 0  # keep the memory alive until the product is done


@njit(**INNER)
def _multiply_panel(panel, functions, groups, group_bytes, quantized, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Unpack a panel, and multiply all rows by it."""
    start, width, column = columns[panel, 0], columns[panel, 1], columns[panel, 2]
    if column >= width:
        return  # an empty panel at the end of a span
    valid = min(PANEL_COLUMNS, width - column)
    rows, row_bytes = quantized.shape
    span_at = np.int64(spans.ctypes.data) + panel // SPAN_PANELS * spans.shape[1]
    bias_at = np.int64(bias.ctypes.data) + panel * PANEL_ROW_BYTES
    unpacked, unpacked_at = aligned_floats(groups * group_bytes // FLOAT_BYTES)
    sums, sums_at = aligned_floats(TILE_ROWS * PANEL_COLUMNS)
    spill = np.empty((TILE_ROWS if valid < PANEL_COLUMNS else 0, PANEL_COLUMNS), np.float32)
    call = UnpackCall(span_at, groups, np.int64(panel % SPAN_PANELS), unpacked_at)
    call_function(functions[UNPACK], call)
    row, tiles = 0, (rows + TILE_ROWS - 1) // TILE_ROWS
    while row < rows:
        # Tiles of nearly equal height: 5 rows are divided into 3 + 2, not 4 + 1.
        height = (rows - row + tiles - 1) // tiles
        tiles -= 1
        target = rows * start + row * width + column
        out_at = np.int64(out.ctypes.data) + target * FLOAT_BYTES
        out_row_bytes = width * FLOAT_BYTES
        if valid < PANEL_COLUMNS:
            out_at, out_row_bytes = np.int64(spill.ctypes.data), np.int64(PANEL_ROW_BYTES)
        x_at = np.int64(quantized[row].ctypes.data)
        tile = Int8TileCall(
            x_at, row_bytes, height, groups, unpacked_at, bias_at, sums_at, out_at, out_row_bytes
        )
        call_function(functions[TILE], tile)
        if valid < PANEL_COLUMNS:
            for i in range(height):
                for j in range(valid):
                    out[target + i * width + j] = spill[i, j]
        row += height
    unpacked[0] = sums[0] = 0  # keep the memory alive until the product is done


@njit(**INNER)
def multiply_task(task, functions, groups, group_bytes, quantized, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply quantised rows by a span or, if they are more than ``MAX_FUSED_ROWS``, by a panel.

    ``functions`` and ``group_bytes`` are those of ``Int8Functions``. ``quantized`` is uint8
    [M, row bytes]. ``columns`` and ``out`` are as in ``gemm.multiply_panels``.
    """
    rows = quantized.shape[0]
    if rows <= MAX_SINGLE_ROWS:
        _multiply_span(task, functions, groups, quantized, spans, bias, columns, out)
        return
    panels = SPAN_PANELS if rows <= MAX_FUSED_ROWS else 1
    for panel in range(task * panels, (task + 1) * panels):
        _multiply_panel(panel, functions, groups, group_bytes, quantized, spans, bias, columns, out)
