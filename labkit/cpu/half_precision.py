"""The numbers of a KV pool in registers: widened to float32 when read, rounded when written.

Every float16 and bfloat16 is a float32, so reading is exact. Writing rounds to the nearest,
ties to even; what is too large becomes infinity, and NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from labkit.cpu.simd_emitter import F32_VECTOR, I32_VECTOR, Emitter
from labkit.cpu.vector_registers import HOST_REGISTERS, LANES

WORDS = ir.VectorType(ir.IntType(16), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_INFINITY = 0x7F800000  # float32
_SCALE = (127 - 15) << 23  # between the exponents of float16 and float32


@dataclass(frozen=True, slots=True)
class Element:
    """A type of a pool's numbers, so many ``bytes`` each, and its two conversions.

    ``widen`` makes a vector of float32 from one of ``words``, ``narrow`` the reverse.
    """

    bytes: int
    words: Any
    widen: Callable[[Emitter, Any], Any]
    narrow: Callable[[Emitter, Any], Any]

    @property
    def vector_bytes(self) -> int:
        """Bytes of ``LANES`` numbers."""
        return self.bytes * LANES

    def load(self, code: Emitter, address: Any) -> Any:
        """Load ``LANES`` numbers as float32."""
        return self.widen(code, code.load(address, kind=self.words))

    def store(self, code: Emitter, value: Any, address: Any) -> None:
        """Round a vector of float32 and store it."""
        code.store(self.narrow(code, value), address)


def widen_by_arithmetic(code: Emitter, words: Any) -> Any:
    """Widen float16 where no instruction does: LLVM would call a function for each number."""
    build = code.builder
    bits = build.zext(words, I32_VECTOR)
    size = build.shl(build.and_(bits, code.integers(0x7FFF)), code.integers(13))
    sign = build.shl(build.and_(bits, code.integers(0x8000)), code.integers(16))
    # Numbers below the smallest normal one, too, are scaled without rounding.
    scaled = build.fmul(build.bitcast(size, F32_VECTOR), code.constant(2.0**112))
    endless = build.icmp_unsigned(">=", size, code.integers(0x7C00 << 13))
    special = build.or_(size, code.integers(_INFINITY))
    wide = build.select(endless, special, build.bitcast(scaled, I32_VECTOR))
    return build.bitcast(build.or_(wide, sign), F32_VECTOR)


def _widen_float16(code: Emitter, words: Any) -> Any:
    build = code.builder
    return build.fpext(build.bitcast(words, _HALVES), F32_VECTOR)


def _narrow_float16(code: Emitter, value: Any) -> Any:
    build = code.builder
    bits = build.bitcast(value, I32_VECTOR)
    size = build.and_(bits, code.integers(0x7FFFFFFF))
    sign = build.lshr(build.and_(bits, code.integers(1 << 31)), code.integers(16))
    odd = build.and_(build.lshr(size, code.integers(13)), code.integers(1))
    half_less = build.add(build.sub(size, code.integers(_SCALE)), code.integers(0xFFF))
    normal = build.lshr(build.add(half_less, odd), code.integers(13))
    # The last bit of 0.5 + x is worth as much as that of a float16 below the normal ones, and
    # 0.5 itself has none of the bits that are kept.
    small = build.bitcast(
        build.fadd(build.bitcast(size, F32_VECTOR), code.constant(0.5)), I32_VECTOR
    )
    nan = build.icmp_unsigned(">", size, code.integers(_INFINITY))
    large = build.select(nan, code.integers(0x7E00), code.integers(0x7C00))
    below = build.icmp_unsigned("<", size, code.integers(_SCALE + (1 << 23)))
    above = build.icmp_unsigned(">=", size, code.integers(_SCALE + (31 << 23)))
    half = build.select(above, large, build.select(below, small, normal))
    return build.trunc(build.or_(half, sign), WORDS)


def _widen_bfloat16(code: Emitter, words: Any) -> Any:
    build = code.builder
    return build.bitcast(build.shl(build.zext(words, I32_VECTOR), code.integers(16)), F32_VECTOR)


def _narrow_bfloat16(code: Emitter, value: Any) -> Any:
    build = code.builder
    bits = build.bitcast(value, I32_VECTOR)
    upper = build.lshr(bits, code.integers(16))
    half_less = build.add(bits, code.integers(0x7FFF))
    nearest = build.add(half_less, build.and_(upper, code.integers(1)))
    nan = build.fcmp_unordered("uno", value, value)
    quiet = build.or_(upper, code.integers(0x40))
    return build.trunc(build.select(nan, quiet, build.lshr(nearest, code.integers(16))), WORDS)


def _same(code: Emitter, value: Any) -> Any:
    return value


FLOAT32 = Element(4, F32_VECTOR, _same, _same)
FLOAT16 = Element(
    2,
    WORDS,
    _widen_float16 if HOST_REGISTERS.converts_float16 else widen_by_arithmetic,
    _narrow_float16,
)
BFLOAT16 = Element(2, WORDS, _widen_bfloat16, _narrow_bfloat16)
# By the type of ``element`` in a layer of ``rows``; numba has no float16 on the CPU.
MARKS = {"float32": np.float32, "float16": np.int16, "bfloat16": np.uint16}
_OF = {types.float32: FLOAT32, types.int16: FLOAT16, types.uint16: BFLOAT16}


def element_of(layer: Any) -> Element:
    """Return what the pools of a layer hold, which its numba type says."""
    return _OF[layer.typeof("element")]
