"""The matrix product with weights as they lie: x[M, K] @ W[N, K].T + bias.

Weights become float32 in registers, to the very bits of ``mlx.core.dequantize`` in float32,
and every output number is the chain ``fma(x[k], w[k], previous)`` of ``gemm``: the product's
bits are those of the widened matrix, whatever the number of rows. For many rows a span is
widened a panel at a time, into memory that the second-level cache holds, and multiplied by
``gemm``'s own register tiles.

Each form has functions of its own, compiled when a model first has it; the kernel is given
their addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending, njit, prange, types
from numpy.typing import NDArray

from labkit.cpu import thread_pool
from labkit.cpu.gemm import (
    BLOCK_ROWS,
    MIN_PARALLEL_FMAS,
    PANEL_COLUMNS,
    ROWS,
    WEIGHT_COST,
    panel_rows,
)
from labkit.cpu.half_precision import BFLOAT16, FLOAT16, FLOAT32, Element
from labkit.cpu.jit import intrinsic
from labkit.cpu.low_precision_weights import QUANTIZED_BITS, SPAN_COLUMNS, SPAN_PANELS, WORD_BITS
from labkit.cpu.microkernels import PANEL_ROW
from labkit.cpu.simd_emitter import (
    F32,
    F32_VECTOR,
    FLOAT_BYTES,
    I32_VECTOR,
    I64,
    VECTOR_BYTES,
    Emitter,
)
from labkit.cpu.vector_registers import LANES

VECTORS = PANEL_COLUMNS // LANES
MAX_FUSED_ROWS = 24  # rows for which weights are widened where they are used
AHEAD = 8192  # bytes of a span that memory is asked for before they are read
CACHE_LINE_BYTES = 64  # bytes of a cache line
LOW_ROWS = 4  # of the lower tile
MANTISSA = 23  # bits of a float32
LIFTED = (2, 3, 4)  # bits of integers
ONE_ROW, TWO_ROWS, LOW, HIGH, WIDEN = range(5)  # of a form's functions


@dataclass(frozen=True, slots=True)
class Form:
    """What a record holds: ``element`` numbers, or integers of so many ``bits``.

    Integers come in groups, behind the group's scales and biases of type ``element``. They can be
    ``lifted`` where every bias minus ``2**bits`` scales is a float32: in the highest bits of a
    mantissa an integer is itself and ``2**bits`` more, which the bias takes away again. That
    saves the conversion, of 4 bits a twentieth of the time of a product of one row.
    """

    element: Element
    bits: int = 0
    lifted: bool = False

    @property
    def unit(self) -> int:
        """Steps that are decoded together: as many as fill whole words."""
        return WORD_BITS // math.gcd(self.bits, WORD_BITS) if self.bits else 1

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit, of all columns of a span."""
        return self.unit * (self.bits or 8 * self.element.bytes) * SPAN_COLUMNS // 8

    @property
    def head_bytes(self) -> int:
        """Bytes of a record before its first unit."""
        return 2 * SPAN_COLUMNS * self.element.bytes if self.bits else 0

    def head(self, code: Emitter, record: Any, panel: Any, vectors: int) -> list[tuple[Any, Any]]:
        """Load a scale and a bias for each of the vectors of columns from a panel on."""
        if not self.bits:
            return []
        build, size = code.builder, self.element.vector_bytes
        at, pairs = build.add(record, build.mul(panel, I64(VECTORS * size))), []
        for v in range(vectors):
            scale = self.element.load(code, build.add(at, I64(v * size)))
            bias = self.element.load(code, build.add(at, I64(self.head_bytes // 2 + v * size)))
            if self.lifted:
                bias = code.fma(code.constant(-float(1 << self.bits)), scale, bias)
            pairs.append((scale, bias))
        return pairs

    def weights(
        self, code: Emitter, unit: Any, panel: Any, head: list[tuple[Any, Any]], vectors: int
    ) -> Callable[[int, int], Any]:
        """Load a unit; return what makes the weights of a step and a vector of columns."""
        build, size = code.builder, self.element.vector_bytes
        if not self.bits:
            at = build.add(unit, build.mul(panel, I64(VECTORS * size)))
            numbers = [
                self.element.load(code, build.add(at, I64(v * size))) for v in range(vectors)
            ]
            return lambda step, vector: numbers[vector]
        at = build.add(unit, build.mul(panel, I64(VECTORS * VECTOR_BYTES)))
        row = 4 * SPAN_COLUMNS
        words = [
            [code.load(at, i * row + v * VECTOR_BYTES, I32_VECTOR)
             for i in range(self.unit * self.bits // WORD_BITS)]
            for v in range(vectors)
        ]  # fmt: skip
        return lambda step, vector: self._affine(code, words[vector], step, *head[vector])

    def _affine(self, code: Emitter, words: list[Any], step: int, scale: Any, bias: Any) -> Any:
        """Cut a step's integer out of the words, and scale it as MLX does."""
        build, at = code.builder, MANTISSA - self.bits if self.lifted else 0
        word, low = divmod(step * self.bits, WORD_BITS)
        bits, over = _moved(code, words[word], at - low), low + self.bits - WORD_BITS
        if over > 0:
            bits = build.or_(bits, _moved(code, words[word + 1], at + self.bits - over))
        if over != 0 or self.lifted:
            bits = build.and_(bits, code.integers(((1 << self.bits) - 1) << at))
        if self.lifted:
            beyond = build.bitcast(code.constant(float(1 << self.bits)), I32_VECTOR)
            number = build.bitcast(build.or_(bits, beyond), F32_VECTOR)
        else:
            number = build.sitofp(bits, F32_VECTOR)
        if self.element is FLOAT32:  # whose product with an integer MLX rounds
            return build.fadd(build.fmul(number, scale), bias)
        return code.fma(number, scale, bias)


def _moved(code: Emitter, words: Any, places: int) -> Any:
    """Move bits up by so many places, or down by as many below 0."""
    if places >= 0:
        return code.builder.shl(words, code.integers(places)) if places else words
    return code.builder.lshr(words, code.integers(-places))


_ELEMENTS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
_HALVES = ("float16", "bfloat16")
# Their index is a constant of the compiled functions.
_NAMES = [
    *((word, 0, False) for word in _HALVES),
    *((word, bits, False) for word in _ELEMENTS for bits in QUANTIZED_BITS),
    *((word, bits, True) for word in _HALVES for bits in LIFTED),
]
_FORMS = [Form(_ELEMENTS[word], bits, lifted) for word, bits, lifted in _NAMES]


@dataclass(frozen=True, slots=True)
class _Span:
    """Addresses and counts of a span, and the part of it that a tile reads; int64."""

    address: Any
    groups: Any
    units: Any
    panel: Any
    vectors: int

    def walk(
        self,
        code: Emitter,
        form: Form,
        step: Callable[[Any, list[Any], list[Any]], list[Any]],
        carried: list[Any],
    ) -> list[Any]:
        """Run ``step(k, weights, carried) -> carried`` for every k; ``weights``: vectors."""
        build = code.builder
        record_bytes = build.add(build.mul(self.units, I64(form.unit_bytes)), I64(form.head_bytes))
        record_steps = build.mul(self.units, I64(form.unit))

        def record_turn(index: Any, carried: list[Any]) -> list[Any]:
            record = build.add(self.address, build.mul(index, record_bytes))
            for line in range(0, form.head_bytes, CACHE_LINE_BYTES):
                code.prefetch(build.add(record, I64(AHEAD + line)))
            head = form.head(code, record, self.panel, self.vectors)
            first = build.mul(index, record_steps)

            def unit_turn(unit: Any, carried: list[Any]) -> list[Any]:
                offset = build.add(build.mul(unit, I64(form.unit_bytes)), I64(form.head_bytes))
                at = build.add(record, offset)
                for line in range(0, form.unit_bytes, CACHE_LINE_BYTES):
                    code.prefetch(build.add(at, I64(AHEAD + line)))
                make = form.weights(code, at, self.panel, head, self.vectors)
                k = build.add(first, build.mul(unit, I64(form.unit)))
                for i in range(form.unit):
                    weights = [make(i, vector) for vector in range(self.vectors)]
                    carried = step(build.add(k, I64(i)), weights, carried)
                return carried

            return code.loop(self.units, unit_turn, carried)

        return code.loop(self.groups, record_turn, carried)


@extending.intrinsic(prefer_literal=True)
def _multiply(  # type: ignore[no-untyped-def]
    _typing, form, rows, panels, x, x_row, count, span, groups, units, panel, bias, out, out_row
):
    """Multiply up to ``rows`` rows with ``panels`` panels, constants like the form's index.

    The others (int64): the address of x, bytes of its row and its rows, the address of the
    span, its records and their units, the first panel in it, bias, the result and bytes of its
    row. Where there are fewer rows, the last is computed repeatedly.
    """
    constants = [kind.literal_value for kind in (form, rows, panels)]

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        x, x_row, count, span, groups, units, panel, bias, out, out_row = arguments[3:]
        form, rows, panels = constants
        code, vectors = Emitter(builder), panels * VECTORS
        last = builder.sub(count, I64(1))
        places = [
            builder.select(builder.icmp_signed("<", I64(row), last), I64(row), last)
            for row in range(rows)
        ]
        x_at = [builder.add(x, builder.mul(place, x_row)) for place in places]
        out_at = [builder.add(out, builder.mul(place, out_row)) for place in places]

        def step(k: Any, weights: list[Any], sums: list[Any]) -> list[Any]:
            column = builder.mul(k, I64(FLOAT_BYTES))
            following = []
            for row, address in enumerate(x_at):
                factor = code.splat(code.load(builder.add(address, column), kind=F32))
                following += [
                    code.fma(factor, weight, sums[row * vectors + v])
                    for v, weight in enumerate(weights)
                ]
            return following

        start = [code.load(bias, VECTOR_BYTES * v) for v in range(vectors)] * rows
        part = _Span(span, groups, units, panel, vectors)
        for i, total in enumerate(part.walk(code, _FORMS[form], step, start)):
            code.store(total, out_at[i // vectors], VECTOR_BYTES * (i % vectors))
        return context.get_dummy_value()

    return types.void(form, rows, panels, *[types.int64] * 10), emit


@extending.intrinsic(prefer_literal=True)
def _widen(_typing, form, span, groups, units, panel, target):  # type: ignore[no-untyped-def]
    """Write a panel of a span as ``gemm`` has it: float32 [K, WIDTH]."""
    index = form.literal_value

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, span, groups, units, panel, target = arguments
        code = Emitter(builder)

        def step(k: Any, weights: list[Any], carried: list[Any]) -> list[Any]:
            line = code.at(target, k, PANEL_ROW)
            for i, weight in enumerate(weights):
                code.store(weight, line, VECTOR_BYTES * i)
            return carried

        part = _Span(span, groups, units, panel, VECTORS)
        part.walk(code, _FORMS[index], step, [])
        return context.get_dummy_value()

    return types.void(form, *[types.int64] * 5), emit


@dataclass(frozen=True, slots=True)
class Functions:
    """The compiled functions of a form.

    ``addresses``: int64, in the order in which the kernel has their names. ``unit``: steps
    along the depth that they decode together. ``made``: what keeps them in memory.
    """

    addresses: NDArray[np.int64]
    unit: int
    made: tuple[Any, ...]


@cache
def functions(element: str, bits: int = 0, lifted: bool = False) -> Functions:
    """Compile the functions of a ``Form``, or load them; ``element``: the type of its floats."""
    index = _NAMES.index((element, bits, False))
    # Sixteen rows were 3 % slower lifted, one row of 8 bits no faster from memory; two and four
    # rows were not measured.
    one_row = _NAMES.index((element, bits, lifted and bits in LIFTED))
    made = [
        _tile(one_row, 1, SPAN_PANELS),
        _tile(index, 2, SPAN_PANELS),
        _tile(index, LOW_ROWS, 1),
        _tile(index, ROWS, 1),
        _widener(index),
    ]
    addresses = np.array([function.address for function in made], np.int64)
    return Functions(addresses, _FORMS[index].unit, tuple(made))


def _tile(form: int, rows: int, panels: int) -> Any:
    def tile(x, x_row, count, span, groups, units, panel, bias, out, out_row):  # type: ignore[no-untyped-def]
        _multiply(
            form, rows, panels, x, x_row, count, span, groups, units, panel, bias, out, out_row
        )

    return _compiled(tile, 10, form, rows, panels)


def _widener(form: int) -> Any:
    def widener(span, groups, units, panel, target):  # type: ignore[no-untyped-def]
        _widen(form, span, groups, units, panel, target)

    return _compiled(widener, 5, form)


def _compiled(function: Any, arguments: int, *constants: int) -> Any:
    # Two functions of one name, each from another process's cache, would be one to the linker.
    function.__qualname__ = "_".join([function.__name__, *map(str, constants)])
    return numba.cfunc(types.void(*[types.int64] * arguments), cache=True)(function)


@intrinsic
def _call(_typing, address, arguments):  # type: ignore[no-untyped-def]
    """Call a function at an address with some int64."""
    count = len(arguments)

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        address, arguments = values
        kind = ir.FunctionType(ir.VoidType(), [I64] * count)
        function = builder.inttoptr(address, kind.as_pointer())
        builder.call(function, [builder.extract_value(arguments, i) for i in range(count)])
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, count)), emit


@njit(error_model="numpy")
def _few(span, functions, groups, units, x, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply a span where it lies."""
    m, x_row = x.shape[0], x.shape[1] * FLOAT_BYTES
    first = span * SPAN_PANELS
    start, width, column = columns[first, 0], columns[first, 1], columns[first, 2]
    valid = min(SPAN_COLUMNS, width - column)
    target = m * start + column
    at, stride = np.int64(out.ctypes.data) + target * FLOAT_BYTES, width * FLOAT_BYTES
    spill = np.empty(m * SPAN_COLUMNS if valid < SPAN_COLUMNS else 0, np.float32)
    if valid < SPAN_COLUMNS:
        at, stride = np.int64(spill.ctypes.data), SPAN_COLUMNS * FLOAT_BYTES
    x_at = np.int64(x.ctypes.data)
    span_at = np.int64(spans.ctypes.data) + span * spans.shape[1]
    bias_at = np.int64(bias.ctypes.data) + first * PANEL_ROW
    if m == 1:
        _call(functions[ONE_ROW], (x_at, x_row, 1, span_at, groups, units, 0, bias_at, at, stride))
    elif m == 2:
        _call(functions[TWO_ROWS], (x_at, x_row, 2, span_at, groups, units, 0, bias_at, at, stride))
    else:
        for panel in range(SPAN_PANELS):
            offset, row = panel * PANEL_ROW, 0
            while row < m:
                rows = min(ROWS, m - row)
                x_row_at, row_at = x_at + row * x_row, at + offset + row * stride
                if rows > LOW_ROWS:
                    _call(functions[HIGH], (x_row_at, x_row, rows, span_at, groups, units, panel,
                          bias_at + offset, row_at, stride))  # fmt: skip
                else:
                    _call(functions[LOW], (x_row_at, x_row, rows, span_at, groups, units, panel,
                         bias_at + offset, row_at, stride))  # fmt: skip
                row += rows
    if valid < SPAN_COLUMNS:
        for i in range(m):
            for j in range(valid):
                out[target + i * width + j] = spill[i * SPAN_COLUMNS + j]


@njit(error_model="numpy")
def _many(panel, functions, groups, units, x, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Widen a panel, once, and multiply it with all rows."""
    if columns[panel, 2] >= columns[panel, 1]:
        return
    span_bytes, part = spans.shape[1], panel % SPAN_PANELS
    span_at = np.int64(spans.ctypes.data) + panel // SPAN_PANELS * span_bytes
    wide = np.empty((x.shape[1], PANEL_COLUMNS), np.float32)
    wide_at = np.int64(wide.ctypes.data)
    _call(functions[WIDEN], (span_at, groups, units, part, wide_at))
    blocks = (x.shape[0] + BLOCK_ROWS - 1) // BLOCK_ROWS
    share = span_bytes // SPAN_PANELS // blocks  # of what comes next, which each block asks for
    ahead = span_at + span_bytes + part * (span_bytes // SPAN_PANELS)
    for block in range(blocks):
        panel_rows(wide_at, panel, block, x, bias, columns, out, ahead + block * share, share)
    wide[0, 0] = 0  # which so lives until here


@njit(error_model="numpy")
def multiply_task(task, functions, groups, units, x, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply a span with few rows, or a panel with many."""
    if x.shape[0] <= MAX_FUSED_ROWS:
        _few(task, functions, groups, units, x, spans, bias, columns, out)
    else:
        _many(task, functions, groups, units, x, spans, bias, columns, out)


@thread_pool.kernel(
    "void(int64[::1], int64, int64, float32[:, ::1], uint8[:, ::1], float32[::1], int64[:, ::1],"
    " float32[::1])",
    error_model="numpy",
)
def product(functions, groups, units, x, spans, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply x [M, K] with all spans into ``out``, as ``gemm.product`` does.

    ``groups`` records of ``units`` units make a span.
    """
    m = x.shape[0]
    tasks = spans.shape[0] if m <= MAX_FUSED_ROWS else columns.shape[0]
    if spans.shape[0] * SPAN_COLUMNS * x.shape[1] * (m + WEIGHT_COST) < MIN_PARALLEL_FMAS:
        for task in range(tasks):
            multiply_task(task, functions, groups, units, x, spans, bias, columns, out)
    else:
        for task in prange(tasks):
            multiply_task(task, functions, groups, units, x, spans, bias, columns, out)


@njit(error_model="numpy")
def take_row(row, functions, groups, units, spans, out):  # type: ignore[no-untyped-def]
    """Widen a row of the matrix into ``out`` [K]."""
    span, panel, column = (
        row // SPAN_COLUMNS,
        row % SPAN_COLUMNS // PANEL_COLUMNS,
        row % PANEL_COLUMNS,
    )
    wide = np.empty((out.size, PANEL_COLUMNS), np.float32)
    span_at = np.int64(spans.ctypes.data) + span * spans.shape[1]
    _call(functions[WIDEN], (span_at, groups, units, panel, np.int64(wide.ctypes.data)))
    for k in range(out.size):
        out[k] = wide[k, column]


@thread_pool.kernel(
    "void(int64[::1], int64, int64, int64[::1], uint8[:, ::1], float32[:, ::1])",
    error_model="numpy",
)
def take(functions, groups, units, rows, spans, out):  # type: ignore[no-untyped-def]
    """Widen some rows of the matrix into ``out`` [len(rows), K]."""
    for i in prange(rows.shape[0]):
        take_row(rows[i], functions, groups, units, spans, out[i])
