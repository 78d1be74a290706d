"""The element types of KV pools, as the attention kernels load and store them.

The kernels are compiled once per element type. A field of the launch's parameters,
``kv_dtype_marker``, selects it by its own numba type.

A row of a pool is one head's key or value. It consists of *blocks*, whose vectors are loaded
together: a block is one vector of floating-point numbers, or a group of quantised elements. Both
kinds of element type have ``block_vectors``, ``block_bytes`` and ``load_vector``.

Quantised elements have the layout and the bits of ``kv_quantization_reference``: a loaded element
is ``scale * integer + bias``, with two roundings, as in MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype

from labkit.cpu.precision.half_precision import BFLOAT16, FLOAT16, FLOAT32, ElementType
from labkit.cpu.precision.kv_dtypes import GROUP_HEADER_BYTES, KV_GROUP, QUANTIZED_BITS, group_bytes
from labkit.cpu.precision.kv_quantization_reference import MIN_SCALE
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import (
    F32,
    F32_VECTOR,
    FLOAT_BYTES,
    I32_VECTOR,
    VECTOR_BYTES,
    Emitter,
)

I8_VECTOR = ir.VectorType(ir.IntType(8), LANES)
GROUP_VECTORS = KV_GROUP // LANES
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True, slots=True)
class QuantizedType:
    """A type of quantised elements, with ``bits`` bits. The counterpart of ``ElementType``."""

    bits: int

    block_vectors = GROUP_VECTORS

    @property
    def block_bytes(self) -> int:
        """Bytes of a group in memory."""
        return group_bytes(f"int{self.bits}")

    def load_vector(self, code: Emitter, row: Any, block: Any, vector: int) -> Any:
        """Load vector ``vector`` of group ``block`` of a row, and dequantise it."""
        build, group = code.builder, code.offset(row, block, self.block_bytes)
        scale, bias = (code.splat(code.load(group, FLOAT_BYTES * i, F32)) for i in range(2))
        packed, shift = (vector, 0) if self.bits == 8 else (vector // 2, 4 * (vector % 2))
        words = code.load(group, GROUP_HEADER_BYTES + LANES * packed, I8_VECTOR)
        if self.bits == 4:
            words = build.lshr(words, _bytes(shift)) if shift else build.and_(words, _bytes(15))
        number = build.uitofp(build.zext(words, I32_VECTOR), F32_VECTOR)
        return build.fadd(build.fmul(number, scale), bias)

    def store(self, code: Emitter, source: Any, row: Any, block: Any) -> None:
        """Quantise the ``KV_GROUP`` float32 at address ``source`` to group ``block`` of a row."""
        numbers = [code.load(source, VECTOR_BYTES * v) for v in range(GROUP_VECTORS)]
        scale, bias = _emit_scale_and_bias(code, numbers, (1 << self.bits) - 1)
        group = code.offset(row, block, self.block_bytes)
        code.store(code.first_lane(scale), group)
        code.store(code.first_lane(bias), group, FLOAT_BYTES)
        integers = [self._quantize(code, number, scale, bias) for number in numbers]
        if self.bits == 4:
            pairs = zip(integers[::2], integers[1::2], strict=True)
            integers = [
                code.builder.or_(low, code.builder.shl(high, _bytes(4))) for low, high in pairs
            ]
        for i, vector in enumerate(integers):
            code.store(vector, group, GROUP_HEADER_BYTES + LANES * i)

    def _quantize(self, code: Emitter, number: Any, scale: Any, bias: Any) -> Any:
        """Return the integers nearest to ``(number - bias) / scale`` as bytes. NaN becomes 0."""
        build, largest = code.builder, code.constant(float((1 << self.bits) - 1))
        place = code.round(build.fdiv(build.fsub(number, bias), scale))
        zero = code.constant(0.0)
        place = build.select(build.fcmp_ordered(">", place, zero), place, zero)
        place = build.select(build.fcmp_ordered("<", place, largest), place, largest)
        return build.trunc(build.fptosi(place, I32_VECTOR), I8_VECTOR)


def _bytes(value: int) -> Any:
    return ir.Constant(I8_VECTOR, [value] * LANES)


def _emit_scale_and_bias(code: Emitter, numbers: list[Any], largest: int) -> tuple[Any, Any]:
    """Return the scale and the bias of a group as vectors of equal lanes."""
    build = code.builder

    def smaller(a: Any, b: Any) -> Any:
        return build.select(build.fcmp_ordered("<", a, b), a, b)

    low, high = code.reduce(numbers, smaller), code.reduce(numbers, code.maximum)
    width = build.fdiv(build.fsub(high, low), code.constant(float(largest)))
    scale = code.maximum(width, code.constant(MIN_SCALE))
    from_low = build.fcmp_ordered(">", code.absolute(low), code.absolute(high))
    scale = build.select(from_low, scale, build.fsub(code.constant(-0.0), scale))
    edge = build.select(from_low, low, high)
    steps = code.round(build.fdiv(edge, scale))
    exact = build.fcmp_unordered("!=", steps, code.constant(0.0))
    scale = build.select(exact, build.fdiv(edge, steps), scale)
    bias = build.select(exact, edge, code.constant(0.0))
    largest_bits = code.largest_magnitude(numbers)
    finite = build.icmp_signed("<", largest_bits, code.integer_constant(_INFINITY_BITS))
    return scale, build.select(finite, bias, code.constant(float("nan")))


PoolElement = ElementType | QuantizedType
INT8, INT4 = (QuantizedType(bits) for bits in QUANTIZED_BITS.values())
# The element types by the type of the KV pools, each with the dtype of ``kv_dtype_marker`` in a
# launch's parameters. Integers represent the half-precision types, because numba has no float16 on
# the CPU.
_ELEMENTS: dict[str, tuple[Any, PoolElement]] = {
    "float32": (np.float32, FLOAT32),
    "float16": (np.int16, FLOAT16),
    "bfloat16": (np.uint16, BFLOAT16),
    "int8": (np.int8, INT8),
    "int4": (np.uint8, INT4),
}
MARKER_DTYPES = {name: marker for name, (marker, _) in _ELEMENTS.items()}
_BY_MARKER = {from_dtype(np.dtype(marker)): element for marker, element in _ELEMENTS.values()}


def element_type(params: Any) -> PoolElement:
    """Return the element type of a launch's KV pools, given the numba type of its parameters."""
    return _BY_MARKER[params.typeof("kv_dtype_marker")]
