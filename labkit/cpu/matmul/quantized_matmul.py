"""The matrix product with low-precision weights: x[M, K] @ W[N, K].T + bias.

Weights are widened to float32 in registers, with the same bits as ``mlx.core.dequantize`` in
float32. Every output element is the chain ``fma(x[k], w[k], previous)`` of ``gemm``. So the result
is identical to the bit to ``gemm`` with the widened matrix, for any number of rows. With many rows,
a panel is first widened into a buffer in the second-level cache and then multiplied by the register
tiles of ``gemm``.

The memory layout of a matrix, which ``quantized_weights`` packs::

    columns of the product (rows of W) ->
    +---------------------------------+---------------------------------+---
    |             span 0              |             span 1              | ...
    |     panel 0    |    panel 1     |     panel 2    |    panel 3     |     PANEL_COLUMNS each
    +----------------+----------------+----------------+----------------+---
    | record 0 of span 0, of all its columns:
    |     scales [SPAN_COLUMNS], biases [SPAN_COLUMNS]    (none in half precision)
    |     pack 0, pack 1, ...                             (numbers or integers)
    | record 1 of span 0 ...

    span    SPAN_PANELS panels, whose weights are contiguous and read once, in order
    record  the steps along K that share scales and biases: a quantisation group, or one step of
            half precision
    pack    the steps that are decoded together: the smallest number that fills 32-bit words

In a block format of GGUF a record is a super-block, or a group if the format has none::

    | super_scales [SPAN_COLUMNS], super_mins [SPAN_COLUMNS]      (what the format has of these)
    | run 0: scales [SPAN_COLUMNS] and mins [SPAN_COLUMNS] of its groups, then its packs
    | run 1 ...

Each weight format has its own functions, compiled when a model first needs them. The kernel calls
them by address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numpy.typing import NDArray

from labkit.cpu.matmul.dequantize_emitter import (
    PANEL_VECTORS,
    BlockWeightFormat,
    RecordFormat,
    Step,
    WeightFormat,
    WeightRecord,
)
from labkit.cpu.matmul.gemm import BLOCK_ROWS, PANEL_COLUMNS, multiply_panel
from labkit.cpu.matmul.microkernels import GEMM_ROWS, PANEL_ROW_BYTES
from labkit.cpu.matmul.quantized_weights import QUANTIZED_BITS, SPAN_COLUMNS, SPAN_PANELS
from labkit.cpu.precision.gguf_block_formats import BLOCK_FORMATS
from labkit.cpu.precision.half_precision import BFLOAT16, FLOAT16, FLOAT32
from labkit.cpu.runtime.jit import c_function, intrinsic
from labkit.cpu.runtime.numba_pipelines import INNER
from labkit.cpu.simd.simd_emitter import FLOAT_BYTES, I64, VECTOR_BYTES, Emitter

MAX_FUSED_ROWS = 24  # up to this number of rows of x, weights are widened in registers
LOW_TILE_ROWS = 4  # rows of the lower of the two register tiles of one panel
MANTISSA_CONVERTED_BITS = (2, 3, 4)  # bits per integer for which mantissa conversion is faster
# The compiled functions of a format, as indices of ``FormatFunctions.addresses``.
ONE_ROW, TWO_ROWS, LOW_TILE, HIGH_TILE, WIDEN = range(5)
NUM_FUNCTIONS = 5

ELEMENTS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
_HALVES = ("float16", "bfloat16")
# The formats by element or name, bits, and whether the mantissa conversion is used.
_FORMATS: dict[tuple[str, int, bool], RecordFormat] = {
    **{(element, 0, False): WeightFormat(ELEMENTS[element]) for element in _HALVES},
    **{
        (element, bits, False): WeightFormat(ELEMENTS[element], bits)
        for element in ELEMENTS
        for bits in QUANTIZED_BITS
    },
    **{
        (element, bits, True): WeightFormat(ELEMENTS[element], bits, in_mantissa=True)
        for element in _HALVES
        for bits in MANTISSA_CONVERTED_BITS
    },
    **{
        (name, layout.bits, False): BlockWeightFormat(layout)
        for name, layout in BLOCK_FORMATS.items()
    },
}
# The compiled functions of a format contain its index in these lists as a constant.
_FORMAT_KEYS, _FORMAT_LIST = list(_FORMATS), list(_FORMATS.values())


class TileCall(NamedTuple):
    """The arguments of a tile's function, all int64, or in an intrinsic their LLVM values.

    The function multiplies rows of x by the columns of one or more panels of a span.
    """

    x: Any  # address of the first row
    x_row_bytes: Any
    rows: Any  # rows of x; a tile with more rows computes the last row repeatedly
    span: Any  # address of the span
    records: Any  # records in the span
    packs: Any  # packs in a record
    panel: Any  # first panel, within the span
    bias: Any  # address of the biases of the first panel's columns
    out: Any  # address of the first element of the result
    out_row_bytes: Any


class WidenCall(NamedTuple):
    """The arguments of a function that widens one panel of a span, as in ``TileCall``."""

    span: Any
    records: Any
    packs: Any
    panel: Any
    target: Any  # address of float32 [K, PANEL_COLUMNS]


def _emit_steps(
    code: Emitter, format_index: int, call: Any, vectors: int, step: Step, carried: list[Any]
) -> list[Any]:
    """Emit the loop along K that reads the weights of ``vectors`` vectors of columns.

    It has ``step`` for every step along K. ``call`` is a ``TileCall`` or a ``WidenCall``. Returns
    the last carried values.
    """
    record_format = _FORMAT_LIST[format_index]
    record_bytes, record_steps = record_format.record_size(code, call.packs)

    def run_record(index: Any, carried: list[Any]) -> list[Any]:
        address = code.offset(call.span, index, record_bytes)
        first_step = code.builder.mul(index, record_steps)
        record = WeightRecord(address, first_step, call.packs, call.panel, vectors)
        return record_format.emit_record(code, record, step, carried)

    return code.loop(call.records, run_record, carried)


def call_intrinsic(emit: Callable[..., None]) -> Any:
    """Make an intrinsic with compile-time constants of ``emit(code, *constants, call)``.

    ``call`` is the NamedTuple that a kernel passes last, with the LLVM values of its int64.
    """

    @extending.intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
    @wraps(emit)
    def define(_typing_context: Any, *kinds: Any) -> Any:
        constants = [kind.literal_value for kind in kinds[:-1]]

        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            call = kinds[-1].instance_class(*unpacked(builder, values[-1], len(kinds[-1])))
            emit(Emitter(builder), *constants, call)
            return context.get_dummy_value()

        return types.void(*kinds), generate

    return define


@call_intrinsic
def _multiply_tile(
    code: Emitter, format_index: int, max_rows: int, panels: int, call: TileCall
) -> None:
    """Multiply up to ``max_rows`` rows by ``panels`` panels, with the arguments ``call``.

    ``format_index`` (an index into ``_FORMATS``), ``max_rows`` and ``panels`` are compile-time
    constants.
    """
    vectors, rows = panels * PANEL_VECTORS, code.clamped(range(max_rows), call.rows)
    x_rows = [code.offset(call.x, row, call.x_row_bytes) for row in rows]
    out_rows = [code.offset(call.out, row, call.out_row_bytes) for row in rows]

    def step(k: Any, weights: list[Any], sums: list[Any]) -> list[Any]:
        column = code.builder.mul(k, I64(FLOAT_BYTES))
        factors = (code.builder.add(address, column) for address in x_rows)
        return code.outer_product(factors, weights, sums)

    sums = [code.load(call.bias, VECTOR_BYTES * v) for v in range(vectors)] * max_rows
    for i, total in enumerate(_emit_steps(code, format_index, call, vectors, step, sums)):
        code.store(total, out_rows[i // vectors], VECTOR_BYTES * (i % vectors))


@call_intrinsic
def _widen_panel(code: Emitter, format_index: int, call: WidenCall) -> None:
    """Write a panel of a span in the layout of ``gemm``: float32 [K, PANEL_COLUMNS]."""

    def step(k: Any, weights: list[Any], carried: list[Any]) -> list[Any]:
        row = code.offset(call.target, k, PANEL_ROW_BYTES)
        for i, weight in enumerate(weights):
            code.store(weight, row, VECTOR_BYTES * i)
        return carried

    _emit_steps(code, format_index, call, PANEL_VECTORS, step, [])


def unpacked(builder: Any, value: Any, count: int) -> list[Any]:
    """Return the LLVM values of the ``count`` elements of a tuple."""
    return [builder.extract_value(value, i) for i in range(count)]


@dataclass(frozen=True, slots=True)
class FormatFunctions:
    """The compiled functions of a weight format.

    ``addresses`` is an int64 array, indexed by ``ONE_ROW`` to ``WIDEN``. ``pack_steps`` is the
    number of steps in a pack. ``compiled`` keeps the functions themselves alive.
    """

    addresses: NDArray[np.int64]
    pack_steps: int
    compiled: tuple[Any, ...]


@cache
def format_functions(element: str, bits: int = 0, mantissa_exact: bool = False) -> FormatFunctions:
    """Compile the functions of a weight format, or load them from numba's cache.

    ``element``, a key of ``NUMPY_DTYPES``, is the type of the weights or, if ``bits`` is not 0, of
    the scales and biases of integers of ``bits`` bits. ``mantissa_exact`` is whether the mantissa
    conversion (``WeightFormat``) is exact for the model's weights.
    """
    index = _FORMAT_KEYS.index((element, bits, False))
    # Only the function for one row uses the mantissa conversion. With it, sixteen rows were 3 %
    # slower, and one row with 8 bits was no faster from memory. Two and four rows: not measured.
    in_mantissa = mantissa_exact and bits in MANTISSA_CONVERTED_BITS
    one_row = _FORMAT_KEYS.index((element, bits, in_mantissa))
    compiled = [
        _compile_tile(one_row, 1, SPAN_PANELS),
        _compile_tile(index, 2, SPAN_PANELS),
        _compile_tile(index, LOW_TILE_ROWS, 1),
        _compile_tile(index, GEMM_ROWS, 1),
        _compile_widen(index),
    ]
    addresses = np.array([function.address for function in compiled], np.int64)
    return FormatFunctions(addresses, _FORMAT_LIST[index].pack_steps, tuple(compiled))


def _compile_tile(format_index: int, max_rows: int, panels: int) -> Any:
    def tile(x, x_row_bytes, rows, span, records, packs, panel, bias, out, out_row_bytes):  # type: ignore[no-untyped-def]
        call = TileCall(x, x_row_bytes, rows, span, records, packs, panel, bias, out, out_row_bytes)
        _multiply_tile(format_index, max_rows, panels, call)

    return compile_function(tile, format_index, max_rows, panels)


def _compile_widen(format_index: int) -> Any:
    def widener(span, records, packs, panel, target):  # type: ignore[no-untyped-def]
        _widen_panel(format_index, WidenCall(span, records, packs, panel, target))

    return compile_function(widener, format_index)


def compile_function(function: Any, *constants: object) -> Any:
    """Compile a function of int64, which contains ``constants``, as a C function."""
    # A unique name, because the linker would merge two functions of the same name that were
    # compiled by different processes and loaded from the cache.
    function.__qualname__ = "_".join([function.__name__, *map(str, constants)])
    arguments = [types.int64] * function.__code__.co_argcount
    return c_function(types.void(*arguments))(function)


@intrinsic
def call_function(_typing, address, arguments):  # type: ignore[no-untyped-def]
    """Call the C function at an address with the elements of a tuple of int64."""
    count = len(arguments)

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        address, arguments = values
        kind = ir.FunctionType(ir.VoidType(), [I64] * count)
        function = builder.inttoptr(address, kind.as_pointer())
        builder.call(function, unpacked(builder, arguments, count))
        return context.get_dummy_value()

    return types.void(types.int64, arguments), emit


@njit(**INNER)
def _multiply_span(span, functions, records, packs, x, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply all rows by one span, whose weights are widened in registers."""
    m, x_row_bytes = x.shape[0], x.shape[1] * FLOAT_BYTES
    first_panel = span * SPAN_PANELS
    start, width, column = columns[first_panel, 0], columns[first_panel, 1], columns[first_panel, 2]
    valid = min(SPAN_COLUMNS, width - column)
    target = m * start + column
    out_at, out_row_bytes = np.int64(out.ctypes.data) + target * FLOAT_BYTES, width * FLOAT_BYTES
    # The last span may extend beyond the matrix: its result is first written to ``spill``.
    spill = np.empty(m * SPAN_COLUMNS if valid < SPAN_COLUMNS else 0, np.float32)
    if valid < SPAN_COLUMNS:
        out_at, out_row_bytes = np.int64(spill.ctypes.data), SPAN_COLUMNS * FLOAT_BYTES
    x_at = np.int64(x.ctypes.data)
    span_at = np.int64(spans.ctypes.data) + span * spans.shape[1]
    bias_at = np.int64(bias.ctypes.data) + first_panel * PANEL_ROW_BYTES
    if 1 <= m <= 2:
        call = TileCall(
            x_at, x_row_bytes, m, span_at, records, packs, np.int64(0), bias_at, out_at,
            out_row_bytes,
        )  # fmt: skip
        call_function(functions[ONE_ROW if m == 1 else TWO_ROWS], call)
    else:
        for panel in range(SPAN_PANELS):
            offset, row = panel * PANEL_ROW_BYTES, 0
            while row < m:
                rows = min(GEMM_ROWS, m - row)
                call = TileCall(
                    x_at + row * x_row_bytes, x_row_bytes, rows, span_at, records, packs, panel,
                    bias_at + offset, out_at + offset + row * out_row_bytes, out_row_bytes,
                )  # fmt: skip
                call_function(functions[HIGH_TILE if rows > LOW_TILE_ROWS else LOW_TILE], call)
                row += rows
    if valid < SPAN_COLUMNS:
        for i in range(m):
            for j in range(valid):
                out[target + i * width + j] = spill[i * SPAN_COLUMNS + j]


@njit(**INNER)
def _multiply_widened_panel(panel, functions, records, packs, x, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Widen a panel to float32 once, and multiply all rows by the widened panel."""
    if columns[panel, 2] >= columns[panel, 1]:
        return  # an empty panel at the end of a span
    span_bytes, panel_in_span = spans.shape[1], panel % SPAN_PANELS
    span_at = np.int64(spans.ctypes.data) + panel // SPAN_PANELS * span_bytes
    widened = np.empty((x.shape[1], PANEL_COLUMNS), np.float32)
    widened_at = np.int64(widened.ctypes.data)
    call_function(functions[WIDEN], WidenCall(span_at, records, packs, panel_in_span, widened_at))
    blocks = (x.shape[0] + BLOCK_ROWS - 1) // BLOCK_ROWS
    # Each block of rows prefetches its share of this panel's part of the next span.
    share = span_bytes // SPAN_PANELS // blocks
    ahead = span_at + span_bytes + panel_in_span * (span_bytes // SPAN_PANELS)
    for block in range(blocks):
        multiply_panel(
            widened_at, panel, block, x, bias, columns, out, ahead + block * share, share
        )
    widened[0, 0] = 0  # keep ``widened`` alive until the product is done


@njit(**INNER)
def multiply_task(task, functions, records, packs, x, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply x by a span if it has at most ``MAX_FUSED_ROWS`` rows, else by a panel.

    ``functions`` is ``FormatFunctions.addresses``. A span consists of ``records`` records of
    ``packs`` packs each. ``columns`` and ``out`` are as in ``gemm.multiply_panels``.
    """
    if x.shape[0] <= MAX_FUSED_ROWS:
        _multiply_span(task, functions, records, packs, x, spans, bias, columns, out)
    else:
        _multiply_widened_panel(task, functions, records, packs, x, spans, bias, columns, out)


@njit(**INNER)
def take_row(row, functions, records, packs, spans, out):  # type: ignore[no-untyped-def]
    """Write a row of the matrix, widened to float32, to ``out`` [K]."""
    span, column = row // SPAN_COLUMNS, row % PANEL_COLUMNS
    panel = row % SPAN_COLUMNS // PANEL_COLUMNS
    widened = np.empty((out.size, PANEL_COLUMNS), np.float32)
    span_at = np.int64(spans.ctypes.data) + span * spans.shape[1]
    widened_at = np.int64(widened.ctypes.data)
    call_function(functions[WIDEN], WidenCall(span_at, records, packs, panel, widened_at))
    for k in range(out.size):
        out[k] = widened[k, column]
