"""Conversion of float16 and bfloat16 in vector registers: widened on loads, rounded on stores.

Every float16 and bfloat16 is also a float32, so widening is exact. Stores round to the nearest,
ties to even. Numbers that are too large become infinity, and NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from labkit.cpu.simd.register_tile_sizes import HOST_REGISTERS, LANES
from labkit.cpu.simd.simd_emitter import F32_VECTOR, I32_VECTOR, Emitter

I16_VECTOR = ir.VectorType(ir.IntType(16), LANES)
_HALF_VECTOR = ir.VectorType(ir.HalfType(), LANES)
_INFINITY = 0x7F800000  # float32
_EXPONENT_SHIFT = (127 - 15) << 23  # difference of the exponent biases, at float32's exponent bits


@dataclass(frozen=True, slots=True)
class ElementType:
    """The type of elements in memory, and its conversions from and to float32.

    ``bytes`` is the size of one element, and ``vector`` the LLVM type of ``LANES`` elements.
    ``widen`` converts such a vector to float32, ``narrow`` converts a float32 vector back.
    """

    bytes: int
    vector: Any
    widen: Callable[[Emitter, Any], Any]
    narrow: Callable[[Emitter, Any], Any]

    block_vectors = 1

    @property
    def vector_bytes(self) -> int:
        """Bytes of ``LANES`` elements in memory."""
        return self.bytes * LANES

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in a row of a KV pool. A block is one vector."""
        return self.vector_bytes

    def load_vector(self, code: Emitter, row: Any, block: Any, _vector: int) -> Any:
        """Load the vector of a block of a KV pool's row, and widen it to float32."""
        return self.load(code, code.offset(row, block, self.vector_bytes))

    def load(self, code: Emitter, address: Any) -> Any:
        """Load ``LANES`` elements and widen them to float32."""
        return self.widen(code, code.load(address, kind=self.vector))

    def store(self, code: Emitter, value: Any, address: Any) -> None:
        """Round a vector of float32 to this type and store it."""
        code.store(self.narrow(code, value), address)


def widen_by_arithmetic(code: Emitter, words: Any) -> Any:
    """Widen float16 with integer and float32 operations, for CPUs without a conversion instruction.

    LLVM's own conversion would call a function for each element on such a CPU.
    """
    build, integer = code.builder, code.integer_constant
    bits = build.zext(words, I32_VECTOR)
    size = build.shl(build.and_(bits, integer(0x7FFF)), integer(13))
    sign = build.shl(build.and_(bits, integer(0x8000)), integer(16))
    # The scaling is exact, even for subnormal numbers.
    scaled = build.fmul(build.bitcast(size, F32_VECTOR), code.constant(2.0**112))
    is_special = build.icmp_unsigned(">=", size, integer(0x7C00 << 13))
    special = build.or_(size, integer(_INFINITY))
    wide = build.select(is_special, special, build.bitcast(scaled, I32_VECTOR))
    return build.bitcast(build.or_(wide, sign), F32_VECTOR)


def _widen_float16(code: Emitter, words: Any) -> Any:
    build = code.builder
    return build.fpext(build.bitcast(words, _HALF_VECTOR), F32_VECTOR)


def _narrow_float16(code: Emitter, value: Any) -> Any:
    build, integer = code.builder, code.integer_constant
    bits = build.bitcast(value, I32_VECTOR)
    size = build.and_(bits, integer(0x7FFFFFFF))
    sign = build.lshr(build.and_(bits, integer(1 << 31)), integer(16))
    odd = build.and_(build.lshr(size, integer(13)), integer(1))
    half_less = build.add(build.sub(size, integer(_EXPONENT_SHIFT)), integer(0xFFF))
    normal = build.lshr(build.add(half_less, odd), integer(13))
    # Subnormal results: the last bit of 0.5 + x has the weight of the last bit of a subnormal
    # float16, so the addition rounds; the bits of 0.5 itself are cut off at the end.
    sum_ = build.fadd(build.bitcast(size, F32_VECTOR), code.constant(0.5))
    small = build.bitcast(sum_, I32_VECTOR)
    nan = build.icmp_unsigned(">", size, integer(_INFINITY))
    large = build.select(nan, integer(0x7E00), integer(0x7C00))
    below = build.icmp_unsigned("<", size, integer(_EXPONENT_SHIFT + (1 << 23)))
    above = build.icmp_unsigned(">=", size, integer(_EXPONENT_SHIFT + (31 << 23)))
    half = build.select(above, large, build.select(below, small, normal))
    return build.trunc(build.or_(half, sign), I16_VECTOR)


def _widen_bfloat16(code: Emitter, words: Any) -> Any:
    upper = code.builder.shl(code.builder.zext(words, I32_VECTOR), code.integer_constant(16))
    return code.builder.bitcast(upper, F32_VECTOR)


def _narrow_bfloat16(code: Emitter, value: Any) -> Any:
    build, integer = code.builder, code.integer_constant
    bits = build.bitcast(value, I32_VECTOR)
    upper = build.lshr(bits, integer(16))
    half_less = build.add(bits, integer(0x7FFF))
    nearest = build.add(half_less, build.and_(upper, integer(1)))
    nan = build.fcmp_unordered("uno", value, value)
    quiet = build.or_(upper, integer(0x40))
    return build.trunc(build.select(nan, quiet, build.lshr(nearest, integer(16))), I16_VECTOR)


def _same(code: Emitter, value: Any) -> Any:
    return value


FLOAT32 = ElementType(4, F32_VECTOR, _same, _same)
FLOAT16 = ElementType(
    2,
    I16_VECTOR,
    _widen_float16 if HOST_REGISTERS.converts_float16 else widen_by_arithmetic,
    _narrow_float16,
)
BFLOAT16 = ElementType(2, I16_VECTOR, _widen_bfloat16, _narrow_bfloat16)
