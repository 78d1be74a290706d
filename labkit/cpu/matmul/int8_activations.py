"""Activations quantised to 8 bits, row by row and group by group.

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
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from labkit.cpu.matmul.int8_dot import I8, I16, MAX_ACTIVATION, DotForm
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import F32, FLOAT_BYTES, I32, I32_VECTOR, VECTOR_BYTES, Emitter

# 1.5 * 2**23: the sum of this and a float32 of at most 2**22 is rounded to an integer, which is the
# sum of ``_ROUNDING_BITS`` and the bits of the sum.
_ROUNDING = 12582912.0
_ROUNDING_BITS = 0x4B400000


def header_floats(form: DotForm) -> int:
    """Return the number of float32 in a group's header."""
    return 3 if form.weight_offset else 2


def emit_quantize(
    code: Emitter, form: DotForm, group_size: int, x: Any, groups: Any, target: Any
) -> None:
    """Emit code that quantises ``groups`` groups of float32 from address ``x`` on to ``target``."""
    size = group_size * form.activation_bytes
    headers = code.offset(target, groups, size)

    def quantize_group(index: Any) -> None:
        source = code.offset(x, index, group_size * FLOAT_BYTES)
        numbers = [code.load(source, VECTOR_BYTES * i) for i in range(group_size // LANES)]
        scale, factor = _emit_scale(code, numbers)
        integers = [_emit_round(code, number, factor) for number in numbers]
        place = code.offset(target, index, size)
        for i, vector in enumerate(integers):
            _emit_store(code, form, vector, place, i * LANES * form.activation_bytes)
        _emit_header(
            code, form, scale, integers, code.offset(headers, index, 4 * header_floats(form))
        )

    code.for_each(groups, quantize_group)


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
    shifted = build.fadd(build.fmul(number, factor), code.constant(_ROUNDING))
    return build.sub(build.bitcast(shifted, I32_VECTOR), code.integer_constant(_ROUNDING_BITS))


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


class QuantizedRows(NamedTuple):
    """Quantised rows: ``integers`` [M, groups, group size], ``scales``, ``sums`` [M, groups]."""

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]
    sums: NDArray[np.float32]  # scale * sum(activation)


def quantize(x: NDArray[np.float32], group_size: int) -> QuantizedRows:
    """Quantise float32 [M, K] in NumPy: the reference, whose bits the kernels reproduce."""
    groups = x.reshape(len(x), -1, group_size)
    with np.errstate(all="ignore"):
        largest = np.abs(groups).max(axis=2)
        factor = np.float32(MAX_ACTIVATION) / largest
        factor[largest == 0] = 0
        shifted = groups * factor[:, :, None] + np.float32(_ROUNDING)
        integers = shifted.view(np.int32) - np.int32(_ROUNDING_BITS)
        scales = largest / np.float32(MAX_ACTIVATION)
        sums = scales * integers.sum(axis=2).astype(np.float32)
    return QuantizedRows(integers.astype(np.int8), scales, sums)
