"""Dot products of unsigned weights and signed activations, by the instructions that the CPU has.

A *form* of the dot product is a choice of instructions. Products of 8-bit integers are exact, and
sums of these products are exact as long as they do not overflow. So all forms give the same result,
and the fastest one is chosen:

========  ============================================================================
vnni      AVX-512 VNNI and AVX-VNNI: ``vpdpbusd`` adds four products to each int32
pairs     AVX2: ``vpmaddubsw`` adds two products of bytes in an int16, ``vpmaddwd`` two
          products of int16 in an int32
sdot      NEON's dot product of signed bytes
generic   any CPU: multiplications of int32
========  ============================================================================

``vpmaddubsw`` saturates: its sum of two products is limited to the range of an int16. With 8-bit
weights the sum can exceed this range. With 4-bit weights even the total of ``PAIRS_TERMS`` such
sums is within it. So ``pairs`` multiplies 4-bit weights as bytes, and 8-bit weights as int16.

An *operand* is a vector of 32-bit lanes, one for each column of the product. A lane contains the
weights of four steps along the depth as bytes, or those of two steps as int16. It is multiplied by
a lane of activations of the same steps, which is the same for all columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from labkit.cpu.runtime.host_target import host_target
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import I32, I32_VECTOR, Emitter

BITS = (4, 8)  # bits per weight for which there are dot products
MAX_ACTIVATION = 127
I8, I16 = ir.IntType(8), ir.IntType(16)
UNLIMITED = 1 << 30
# Sums of two products of 4-bit weights that fit an int16: 8 * 2 * 15 * 128 is less than 2**15.
PAIRS_TERMS = 8


@dataclass(frozen=True, slots=True)
class DotForm:
    """A form of dot products with weights of ``bits`` bits."""

    # name, bits: the form's name, and the bits per weight.
    name: str
    bits: int
    # ``add(code, sums, operand, activations)`` emits code that adds the products of two vectors to
    # ``sums`` (None: zeros) and returns the new sums.
    add: Callable[[Emitter, Any, Any, Any], Any]
    finish: Callable[[Emitter, Any], Any]  # converts sums to a vector of int32, one for each column
    # The number of operands after which ``finish`` must be called, because sums could overflow.
    max_terms: int = UNLIMITED
    # Bytes per activation in a lane: 1 or 2. Weights in an operand have the same width.
    activation_bytes: int = 1
    # The number that is subtracted from the weights, to make them signed. The caller must add
    # ``weight_offset`` times the sum of the activations.
    weight_offset: int = 0

    @property
    def lane_steps(self) -> int:
        """Number of steps along the depth in a lane."""
        return 4 // self.activation_bytes

    @property
    def word_operands(self) -> int:
        """Number of operands into which a vector of 32-bit words of packed weights is unpacked."""
        return 32 // self.bits // self.lane_steps

    @property
    def step_order(self) -> tuple[int, ...]:
        """The indices of ``LANES`` successive steps, in the order of the steps in the operands."""
        count, steps = self.word_operands, 32 // self.bits
        return tuple(
            word + operand + count * i
            for word in range(0, LANES, steps)
            for operand in range(count)
            for i in range(self.lane_steps)
        )

    def operands(self, code: Emitter, words: Any) -> list[Any]:
        """Emit code that unpacks a vector of 32-bit words into ``n = word_operands`` operands.

        A word contains the weights of successive steps, the first one in the lowest bits. Operand
        ``i`` gets the steps ``i``, ``i + n``, ``i + 2 * n``, ...
        """
        build, width, ones = code.builder, 8 * self.activation_bytes, (1 << self.bits) - 1
        parts = [
            build.lshr(words, code.integer_constant(self.bits * i)) if i else words
            for i in range(self.word_operands)
        ]
        if self.bits < width:
            mask = code.integer_constant(sum(ones << place for place in range(0, 32, width)))
            parts = [build.and_(part, mask) for part in parts]
        if self.weight_offset:
            offset = code.integer_constant(sum(self.weight_offset << place for place in _PLACES))
            parts = [build.xor(part, offset) for part in parts]
        return parts


_PLACES = (0, 8, 16, 24)


def _same(code: Emitter, sums: Any) -> Any:
    return sums


def _add_to(code: Emitter, sums: Any, products: Any) -> Any:
    return products if sums is None else code.builder.add(sums, products)


def _zeros(sums: Any) -> Any:
    return ir.Constant(I32_VECTOR, [0] * LANES) if sums is None else sums


def _add_vnni(lanes: int, code: Emitter, sums: Any, weights: Any, activations: Any) -> Any:
    kind, name = ir.VectorType(I32, lanes), f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    vectors = [(vector, kind) for vector in (_zeros(sums), weights, activations)]
    return code.call_by_register(name, lanes, kind, *vectors)


def _add_pairs_of_bytes(
    lanes: int, code: Emitter, sums: Any, weights: Any, activations: Any
) -> Any:
    name = "llvm.x86.avx512.pmaddubs.w.512" if lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
    kind = ir.VectorType(I8, 4 * lanes)
    sum_kind, pairs = ir.VectorType(I16, 2 * lanes), ((weights, kind), (activations, kind))
    return _add_to(code, sums, code.call_by_register(name, lanes, sum_kind, *pairs))


def _multiply_pairs(lanes: int, code: Emitter, a: Any, b: Any) -> Any:
    name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    kind = ir.VectorType(I16, 2 * lanes)
    return code.call_by_register(name, lanes, ir.VectorType(I32, lanes), (a, kind), (b, kind))


def _add_pairs(lanes: int, code: Emitter, sums: Any, weights: Any, activations: Any) -> Any:
    return _add_to(code, sums, _multiply_pairs(lanes, code, weights, activations))


def _finish_pairs(lanes: int, code: Emitter, sums: Any) -> Any:
    ones = ir.Constant(ir.VectorType(I16, 2 * LANES), [1] * (2 * LANES))
    return _multiply_pairs(lanes, code, sums, ones)


def _add_sdot(code: Emitter, sums: Any, weights: Any, activations: Any) -> Any:
    sum_kind, kind = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
    vectors = ((_zeros(sums), sum_kind), (weights, kind), (activations, kind))
    return code.call_by_register("llvm.aarch64.neon.sdot.v4i32.v16i8", 4, sum_kind, *vectors)


def _add_generic(code: Emitter, sums: Any, weights: Any, activations: Any) -> Any:
    build, constant = code.builder, code.integer_constant
    for place in _PLACES:
        weight = build.and_(build.lshr(weights, constant(place)), constant(0xFF))
        left = build.shl(activations, constant(24 - place))
        sums = _add_to(code, sums, build.mul(weight, build.ashr(left, constant(24))))
    return sums


def _vnni(lanes: int, bits: int) -> DotForm:
    return DotForm(f"vnni{32 * lanes}", bits, partial(_add_vnni, lanes), _same)


def _pairs(lanes: int, bits: int) -> DotForm:
    name, finish = f"pairs{32 * lanes}", partial(_finish_pairs, lanes)
    if bits == 4:
        return DotForm(name, 4, partial(_add_pairs_of_bytes, lanes), finish, PAIRS_TERMS)
    return DotForm(name, 8, partial(_add_pairs, lanes), _same, activation_bytes=2)


def _sdot(bits: int) -> DotForm:
    return DotForm("sdot", bits, _add_sdot, _same, weight_offset=0 if bits == 4 else 128)


def generic(bits: int) -> DotForm:
    """Return the form that every CPU can run."""
    return DotForm("generic", bits, _add_generic, _same)


def form_of(bits: int, triple: str, cpu: str, features: str) -> DotForm:
    """Return the fastest form of an LLVM target, for weights of 4 or 8 bits.

    ``features`` is a list such as ``+avx2,+fma``.
    """
    available = set(features.split(","))
    if triple.startswith(("aarch64", "arm64")):
        # LLVM lists no features of Apple's processors, all of which have the dot product.
        return _sdot(bits) if "+dotprod" in available or cpu.startswith("apple") else generic(bits)
    if "+avx512vnni" in available:
        return _vnni(16, bits)
    if "+avxvnni" in available:
        return _vnni(8, bits)
    if "+avx512bw" in available:
        return _pairs(16, bits)
    return _pairs(8, bits) if "+avx2" in available else generic(bits)


def host_form(bits: int) -> DotForm:
    """Return the fastest form of the CPU that numba compiles for."""
    return form_of(bits, *host_target())
