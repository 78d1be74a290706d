"""The innermost loops of ``int8_matmul``, which quantise rows of activations and multiply them.

A row of activations is divided into groups like a row of weights, so that the activations of a
group are multiplied by weights with the same scale and bias. Quantisation is symmetric: the scale
is the group's largest magnitude divided by ``MAX_ACTIVATION``, and an activation becomes the
nearest integer to ``activation / scale`` (ties to even). So the product of a group of weights
``integer * scale + bias`` and a group of quantised activations is::

    scale * activation_scale * sum(integer * activation) + bias * activation_scale * sum(activation)

The layout of a quantised row, all of whose parts start at multiples of 4 bytes::

    activations [groups, group_size]   int8 or int16, the steps in the order of the dot product
    header [groups, header floats]     scale, scale * sum(activation), and, for dot products of
                                       signed weights, weight_offset * sum(activation)

If an activation is NaN or infinite, the group's products are NaN or infinite.

Weights come from a span (the memory layout of ``quantized_matmul``), whose words are unpacked in
registers, or from a panel that was unpacked before. An unpacked panel is::

    group 0    scales [PANEL_COLUMNS], biases [PANEL_COLUMNS]      float32
               operand 0, operand 1, ...                           PANEL_COLUMNS lanes of 32 bits
    group 1 ...

Addresses are int64, strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir

from labkit.cpu.matmul.dequantize_emitter import PANEL_VECTORS, WeightFormat, WeightRecord, prefetch
from labkit.cpu.matmul.int8_dot import BITS, I8, I16, MAX_ACTIVATION, DotForm, host_form
from labkit.cpu.matmul.microkernels import PANEL_ROW_BYTES
from labkit.cpu.matmul.quantized_matmul import ELEMENTS, call_intrinsic
from labkit.cpu.matmul.quantized_weights import GROUP_SIZES, SPAN_COLUMNS, SPAN_PANELS
from labkit.cpu.simd.register_tile_sizes import HOST_REGISTERS, LANES
from labkit.cpu.simd.simd_emitter import (
    F32,
    F32_VECTOR,
    FLOAT_BYTES,
    I32,
    I32_VECTOR,
    I64,
    VECTOR_BYTES,
    Emitter,
)

# 1.5 * 2**23: the sum of this and a float32 of at most 2**22 is rounded to an integer, which is the
# sum of ``ROUNDING_BITS`` and the bits of the sum.
ROUNDING = 12582912.0
ROUNDING_BITS = 0x4B400000
# Rows of a register tile, whose sums of integers stay in registers. Its sums of floats are in
# memory, because they are needed only once per group.
TILE_ROWS = 8 if HOST_REGISTERS.lanes == LANES else 4
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Int8Format:
    """The format of quantised weights, and the form of their dot products with activations.

    ``element`` is the type of scales and biases, ``bits`` the bits per weight.
    """

    element: str
    bits: int
    group_size: int
    form: DotForm

    @property
    def weights(self) -> WeightFormat:
        """The format of a span's records."""
        return WeightFormat(ELEMENTS[self.element], self.bits)

    @property
    def group_operands(self) -> int:
        """Number of operands of a dot product in a group."""
        return self.group_size // self.form.lane_steps

    @property
    def record_bytes(self) -> int:
        """Bytes of a span's record, which is a group of all its columns."""
        return self.weights.header_bytes + self.group_size * self.bits // 8 * SPAN_COLUMNS

    @property
    def panel_group_bytes(self) -> int:
        """Bytes of a group of an unpacked panel."""
        return (2 + self.group_operands) * PANEL_ROW_BYTES

    @property
    def activations_bytes(self) -> int:
        """Bytes of a row's activations in a group."""
        return self.group_size * self.form.activation_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes of a row's header of a group."""
        return FLOAT_BYTES * (3 if self.form.weight_offset else 2)


# The compiled functions of a format contain its index in this list as a constant.
FORMATS = [
    Int8Format(element, bits, group_size, host_form(bits))
    for element in ELEMENTS
    for bits in BITS
    for group_size in GROUP_SIZES
]


class RowCall(NamedTuple):
    """The arguments of ``multiply_row``: int64 or, inside the intrinsic, their LLVM values."""

    x: Any  # address of the row
    groups: Any
    span: Any
    bias: Any  # address of the biases of the span's columns
    sums: Any  # address of SPAN_COLUMNS float32 that start on a cache line
    out: Any


class UnpackCall(NamedTuple):
    """The arguments of ``unpack_panel``, as in ``RowCall``."""

    span: Any
    groups: Any
    panel: Any  # index of the panel in the span
    target: Any


class Int8TileCall(NamedTuple):
    """The arguments of ``multiply_tile``, as in ``RowCall``."""

    x: Any  # address of the first row
    x_row_bytes: Any
    rows: Any  # 1 to TILE_ROWS; a tile with fewer rows computes the last row repeatedly
    groups: Any
    panel: Any
    bias: Any  # address of the biases of the panel's columns
    sums: Any  # address of TILE_ROWS * PANEL_COLUMNS float32 that start on a cache line
    out: Any  # address of the first element of the result
    out_row_bytes: Any


class QuantizeCall(NamedTuple):
    """The arguments of ``quantize_row``, as in ``RowCall``."""

    x: Any  # address of the row, float32
    groups: Any
    target: Any


@dataclass(frozen=True, slots=True)
class _Weights:
    """A group of weights, for some vectors of columns.

    ``pairs`` are (scale, bias) of each vector. ``operand(i)`` emits code that loads operand ``i``
    of the group, and returns it for each vector. It must be called once for each ``i``, in order.
    """

    pairs: Sequence[tuple[Any, Any]]
    operand: Callable[[int], list[Any]]


def _emit_group(
    code: Emitter, spec: Int8Format, weights: _Weights, rows: Sequence[Any], sums: Sequence[Any]
) -> None:
    """Emit code that adds a group's terms to the sums of some rows.

    ``rows`` has the addresses of each row's activations and of its header of this group. ``sums``
    has the address of each row's sums.
    """
    dots = _emit_dots(code, spec, weights, [activations for activations, _ in rows])
    for (_, header), total, dots_of_row in zip(rows, sums, dots, strict=True):
        factor, addend, *offset = (
            code.splat(code.load(header, FLOAT_BYTES * i, F32))
            for i in range(spec.header_bytes // FLOAT_BYTES)
        )
        for v, ((scale, bias), dot) in enumerate(zip(weights.pairs, dots_of_row, strict=True)):
            number = code.builder.sitofp(dot, F32_VECTOR)
            if offset:
                number = code.builder.fadd(number, offset[0])  # exact: integers below 2**24
            value = code.load(total, VECTOR_BYTES * v)
            value = code.fma(number, code.builder.fmul(scale, factor), value)
            code.store(code.fma(bias, addend, value), total, VECTOR_BYTES * v)


def _emit_dots(
    code: Emitter, spec: Int8Format, weights: _Weights, rows: Sequence[Any]
) -> list[list[Any]]:
    """Return the dot products of a group: for each row an int32 vector per vector of columns."""
    form, count = spec.form, len(weights.pairs)
    partial: list[list[Any]] = [[None] * count for _ in rows]
    totals: list[list[Any]] = [[None] * count for _ in rows]
    for i in range(spec.group_operands):
        columns = weights.operand(i)
        full = i + 1 == spec.group_operands or (i + 1) % form.max_terms == 0
        for row, sums, dots in zip(rows, partial, totals, strict=True):
            lane = code.splat(code.load(row, _WORD_BYTES * i, I32))
            for v, column in enumerate(columns):
                sums[v] = form.add(code, sums[v], column, lane)
                if full:
                    done, sums[v] = form.finish(code, sums[v]), None
                    dots[v] = done if dots[v] is None else code.builder.add(dots[v], done)
    return totals


def _read_span(code: Emitter, spec: Int8Format, record: Any, panel: Any, vectors: int) -> _Weights:
    """Return a group of weights, unpacked from a record of a span.

    ``vectors`` vectors of columns are read, from panel ``panel`` of the span on.
    """
    header, row_bytes = spec.weights.header_bytes, _WORD_BYTES * SPAN_COLUMNS
    prefetch(code, record, spec.record_bytes)
    pairs = spec.weights.emit_header(code, WeightRecord(record, None, None, panel, vectors))
    first = code.builder.add(record, code.offset(I64(header), panel, PANEL_ROW_BYTES))
    ready: list[list[Any]] = []  # the operands of the last words

    def operand(index: int) -> list[Any]:
        word, part = divmod(index, spec.form.word_operands)
        if part == 0:
            words = [
                code.load(first, word * row_bytes + VECTOR_BYTES * v, I32_VECTOR)
                for v in range(vectors)
            ]
            ready[:] = [spec.form.operands(code, vector) for vector in words]
        return [operands[part] for operands in ready]

    return _Weights(pairs, operand)


def _read_panel(code: Emitter, group: Any) -> _Weights:
    """Return the weights of a group of an unpacked panel."""
    vectors = range(PANEL_VECTORS)

    def load(row: int, kind: Any = F32_VECTOR) -> list[Any]:
        return [code.load(group, PANEL_ROW_BYTES * row + VECTOR_BYTES * v, kind) for v in vectors]

    pairs = list(zip(load(0), load(1), strict=True))
    return _Weights(pairs, lambda index: load(2 + index, I32_VECTOR))


def _row_parts(code: Emitter, spec: Int8Format, x: Any, groups: Any, index: Any) -> tuple[Any, Any]:
    """Return the addresses of the activations and the header of group ``index`` in row ``x``.

    ``groups`` is the number of groups in a row.
    """
    headers = code.offset(x, groups, spec.activations_bytes)
    return (
        code.offset(x, index, spec.activations_bytes),
        code.offset(headers, index, spec.header_bytes),
    )


@call_intrinsic
def multiply_row(code: Emitter, format_index: int, call: RowCall) -> None:
    """Multiply one row by all panels of a span, whose words are unpacked in registers."""
    spec, vectors = FORMATS[format_index], SPAN_PANELS * PANEL_VECTORS

    def add_group(index: Any) -> None:
        record = code.offset(call.span, index, spec.record_bytes)
        weights = _read_span(code, spec, record, I64(0), vectors)
        row = _row_parts(code, spec, call.x, call.groups, index)
        _emit_group(code, spec, weights, [row], [call.sums])

    code.copy_vectors(call.sums, call.bias, vectors)
    code.for_each(call.groups, add_group)
    code.copy_vectors(call.out, call.sums, vectors)


@call_intrinsic
def unpack_panel(code: Emitter, format_index: int, call: UnpackCall) -> None:
    """Unpack one panel of a span."""
    spec = FORMATS[format_index]

    def unpack_group(index: Any) -> None:
        record = code.offset(call.span, index, spec.record_bytes)
        weights = _read_span(code, spec, record, call.panel, PANEL_VECTORS)
        target = code.offset(call.target, index, spec.panel_group_bytes)
        for place, row in enumerate(zip(*weights.pairs, strict=True)):
            _store_row(code, row, target, place)
        for i in range(spec.group_operands):
            _store_row(code, weights.operand(i), target, 2 + i)

    code.for_each(call.groups, unpack_group)


def _store_row(code: Emitter, vectors: Sequence[Any], target: Any, place: int) -> None:
    for v, vector in enumerate(vectors):
        code.store(vector, target, PANEL_ROW_BYTES * place + VECTOR_BYTES * v)


@call_intrinsic
def multiply_tile(code: Emitter, format_index: int, call: Int8TileCall) -> None:
    """Multiply up to ``TILE_ROWS`` rows by an unpacked panel."""
    spec, numbers = FORMATS[format_index], code.clamped(range(TILE_ROWS), call.rows)
    sources = [code.offset(call.x, row, call.x_row_bytes) for row in numbers]
    targets = [code.offset(call.out, row, call.out_row_bytes) for row in numbers]
    sums = code.strided(call.sums, PANEL_ROW_BYTES, TILE_ROWS)

    def add_group(index: Any) -> None:
        group = code.offset(call.panel, index, spec.panel_group_bytes)
        rows = [_row_parts(code, spec, x, call.groups, index) for x in sources]
        _emit_group(code, spec, _read_panel(code, group), rows, sums)

    for total in sums:
        code.copy_vectors(total, call.bias, PANEL_VECTORS)
    code.for_each(call.groups, add_group)
    for target, total in zip(targets, sums, strict=True):
        code.copy_vectors(target, total, PANEL_VECTORS)


@call_intrinsic
def quantize_row(code: Emitter, format_index: int, call: QuantizeCall) -> None:
    """Quantise one row of float32."""
    spec = FORMATS[format_index]
    headers = code.offset(call.target, call.groups, spec.activations_bytes)

    def quantize_group(index: Any) -> None:
        source = code.offset(call.x, index, spec.group_size * FLOAT_BYTES)
        numbers = [code.load(source, VECTOR_BYTES * i) for i in range(spec.group_size // LANES)]
        scale, factor = _emit_scale(code, numbers)
        integers = [_emit_round(code, number, factor) for number in numbers]
        place = code.offset(call.target, index, spec.activations_bytes)
        for i, vector in enumerate(integers):
            _emit_store(code, spec.form, vector, place, i * LANES * spec.form.activation_bytes)
        header = code.offset(headers, index, spec.header_bytes)
        _emit_header(code, spec.form, scale, integers, header)

    code.for_each(call.groups, quantize_group)


def _emit_scale(code: Emitter, numbers: list[Any]) -> tuple[Any, Any]:
    """Return a group's scale, and a vector of the factor that turns activations into integers."""
    build = code.builder
    top = build.bitcast(code.first_lane(code.largest_magnitude(numbers)), F32)
    limit, zero = ir.Constant(F32, float(MAX_ACTIVATION)), ir.Constant(F32, 0.0)
    factor = build.select(build.fcmp_ordered("==", top, zero), zero, build.fdiv(limit, top))
    return build.fdiv(top, limit), code.splat(factor)


def _emit_round(code: Emitter, number: Any, factor: Any) -> Any:
    """Return ``number * factor``, rounded to the nearest integer, as int32."""
    build = code.builder
    shifted = build.fadd(build.fmul(number, factor), code.constant(ROUNDING))
    return build.sub(build.bitcast(shifted, I32_VECTOR), code.integer_constant(ROUNDING_BITS))


def _emit_store(code: Emitter, form: DotForm, integers: Any, address: Any, offset: int) -> None:
    """Store a vector of integers in the order of ``DotForm.step_order``."""
    narrow = ir.VectorType(I8 if form.activation_bytes == 1 else I16, LANES)
    ordered = code.shuffle(
        code.builder.trunc(integers, narrow), ir.Constant(narrow, ir.Undefined), form.step_order
    )
    code.store(ordered, address, offset)


def _emit_header(
    code: Emitter, form: DotForm, scale: Any, integers: list[Any], header: Any
) -> None:
    build = code.builder
    total = code.first_lane(code.reduce(integers, build.add))
    code.store(scale, header)
    code.store(build.fmul(scale, build.sitofp(total, F32)), header, FLOAT_BYTES)
    if form.weight_offset:
        offset = build.mul(total, I32(form.weight_offset))
        code.store(build.sitofp(offset, F32), header, 2 * FLOAT_BYTES)
