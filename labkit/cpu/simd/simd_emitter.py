"""Emits vector instructions as LLVM IR: the building blocks of the kernels' intrinsics.

numba has no vector type, and LLVM's auto-vectoriser neither keeps a register tile in registers nor
fixes the order of a sum. So ``Emitter`` emits the instructions directly. Every operation has one
fixed order and no fast-math, so that the bits of an element never depend on other elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from labkit.cpu.runtime import jit
from labkit.cpu.simd.register_tile_sizes import AVX2, AVX512, HOST_REGISTERS, LANES, NEON

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
POINTER = ir.PointerType()
F32_VECTOR = ir.VectorType(F32, LANES)
I32_VECTOR = ir.VectorType(I32, LANES)
I8 = ir.IntType(8)
_BYTE_VECTOR = ir.VectorType(I8, 4 * LANES)
# The instruction that looks up bytes in a table of 16, and its bytes, by the CPU's registers.
_BYTE_LOOKUPS = {
    AVX512: ("llvm.x86.avx2.pshuf.b", 32),
    AVX2: ("llvm.x86.avx2.pshuf.b", 32),
    NEON: ("llvm.aarch64.neon.tbl1.v16i8", 16),
}
FLOAT_BYTES = 4
VECTOR_BYTES = FLOAT_BYTES * LANES

# Coefficients of a polynomial for 2**f, f in [-0.5, 0.5], highest power first. Fitted by least
# squares of the relative error at Chebyshev nodes; the error is below 3e-9.
_EXP2 = (
    0.000153707048167041,
    0.0013399848290709115,
    0.00961837325135214,
    0.055503290351535756,
    0.240226484622812,
    0.6931472055770999,
    1.0,
)
_MAGIC = 12582912.0  # 1.5 * 2**23: after adding this, the low bits of a float32 are an integer
LOG2E = math.log2(math.e)


class Emitter:
    """Emits vector instructions at the builder's position. Addresses are int64."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def load(self, address: Any, offset: int = 0, kind: Any = F32_VECTOR) -> Any:
        """Load a value of the LLVM type ``kind`` from ``address + offset``."""
        return self.builder.load(self._pointer(address, offset), align=4, typ=kind)

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        """Store a vector or a scalar at ``address + offset``."""
        self.builder.store(value, self._pointer(address, offset), align=4)

    def copy_vectors(self, target: Any, source: Any, count: int) -> None:
        """Copy ``count`` vectors from one address to another."""
        for offset in range(0, VECTOR_BYTES * count, VECTOR_BYTES):
            self.store(self.load(source, offset), target, offset)

    def prefetch(self, address: Any) -> None:
        """Prefetch the cache line at ``address`` into the second-level cache."""
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        function = self.declared("llvm.prefetch.p0", kind)
        self.builder.call(function, [self._pointer(address, 0), I32(0), I32(2), I32(1)])

    def constant(self, value: float) -> Any:
        """Return a vector whose lanes all contain the same float32 constant."""
        return ir.Constant(F32_VECTOR, [value] * LANES)

    def integer_constant(self, value: int) -> Any:
        """Return a vector whose lanes all contain the same int32 constant."""
        return ir.Constant(I32_VECTOR, [value] * LANES)

    def splat(self, scalar: Any) -> Any:
        """Return a vector whose lanes all contain the same scalar, of any type."""
        undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        one = self.builder.insert_element(undefined, scalar, I32(0))
        return self.shuffle(one, undefined, [0] * LANES)

    def first_lane(self, vector: Any) -> Any:
        """Return lane 0 of a vector as a scalar."""
        return self.builder.extract_element(vector, I32(0))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return ``a * b + c``, rounded once."""
        kind = ir.FunctionType(F32_VECTOR, [F32_VECTOR] * 3)
        return self.builder.call(self.declared(f"llvm.fma.v{LANES}f32", kind), [a, b, c])

    def outer_product(
        self, factors: Iterable[Any], columns: Sequence[Any], sums: Sequence[Any]
    ) -> list[Any]:
        """Add an outer product to a register tile and return the tile.

        ``factors`` contains the address of one scalar for each row of the tile. ``columns`` are the
        vectors by which each scalar is multiplied. ``sums`` is the tile, row after row.
        """
        width, totals = len(columns), []
        for i, address in enumerate(factors):
            factor = self.splat(self.load(address, kind=F32))
            for column, total in zip(columns, sums[i * width : (i + 1) * width], strict=True):
                totals.append(self.fma(factor, column, total))
        return totals

    def lookup_bytes(self, table: Sequence[int], indices: Any) -> Any:
        """Replace every byte ``i`` of ``indices`` by ``table[i]``.

        ``indices`` is a vector of int32, whose bytes are 0 to 15. ``table`` contains 16 integers of
        8 bits.
        """
        build = self.builder
        if HOST_REGISTERS in _BYTE_LOOKUPS:
            name, width = _BYTE_LOOKUPS[HOST_REGISTERS]
            kind, values = ir.VectorType(I8, width), self._bytes(list(table) * (LANES // 4))
            parts = self.call_by_register(name, width // 4, kind, (values, kind), (indices, kind))
            return build.bitcast(parts, I32_VECTOR)
        lanes, values = build.bitcast(indices, _BYTE_VECTOR), self._bytes([table[0]] * 4 * LANES)
        for index, value in enumerate(table[1:], 1):
            is_index = build.icmp_unsigned("==", lanes, self._bytes([index] * 4 * LANES))
            values = build.select(is_index, self._bytes([value] * 4 * LANES), values)
        return build.bitcast(values, I32_VECTOR)

    def _bytes(self, values: list[int]) -> Any:
        return ir.Constant(_BYTE_VECTOR, values)

    def call_by_register(self, name: str, lanes: int, result: Any, *vectors: Any) -> Any:
        """Split vectors into registers, call an LLVM intrinsic for each, and join the results.

        ``lanes`` is the number of 32-bit lanes of a register. ``vectors`` contains a pair for each
        argument of the intrinsic: the vector to split, and the type of the argument. ``result`` is
        the type that the intrinsic returns.
        """
        build, kinds = self.builder, [kind for _, kind in vectors]
        function = self.declared(name, ir.FunctionType(result, kinds))
        columns = [self.split(vector, lanes) for vector, _ in vectors]
        calls = (
            [build.bitcast(part, kind) for part, kind in zip(parts, kinds, strict=True)]
            for parts in zip(*columns, strict=True)
        )
        return self.join([build.call(function, arguments) for arguments in calls])

    def split(self, vector: Any, lanes: int) -> list[Any]:
        """Split a vector of ``32 * LANES`` bits into parts of ``lanes`` lanes of 32 bits."""
        if lanes == LANES:
            return [vector]
        size = vector.type.count * lanes // LANES
        firsts = range(0, vector.type.count, size)
        return [self.shuffle(vector, vector, range(first, first + size)) for first in firsts]

    def join(self, parts: list[Any]) -> Any:
        """Join the parts of ``split`` to one vector."""
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [self.shuffle(a, b, range(2 * a.type.count)) for a, b in pairs]
        return parts[0]

    def maximum(self, a: Any, b: Any) -> Any:
        """Return the larger of ``a`` and ``b`` in each lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def absolute(self, x: Any) -> Any:
        """Return ``x`` without its sign."""
        kind = ir.FunctionType(F32_VECTOR, [F32_VECTOR])
        return self.builder.call(self.declared(f"llvm.fabs.v{LANES}f32", kind), [x])

    def round(self, x: Any) -> Any:
        """Return ``x`` rounded to the nearest integer, ties to even."""
        kind = ir.FunctionType(F32_VECTOR, [F32_VECTOR])
        return self.builder.call(self.declared(f"llvm.rint.v{LANES}f32", kind), [x])

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Return the listed lanes of two vectors. Those of ``b`` follow those of ``a``."""
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(a, b, order)

    def reduce(self, vectors: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
        """Combine vectors, one after another, and then the lanes of the result."""
        return self.reduce_lanes(functools.reduce(combine, vectors), combine)

    def reduce_lanes(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine all lanes pairwise in a fixed order. Every lane of the result is the total."""
        half = LANES // 2
        while half:
            swapped = self.shuffle(vector, vector, [lane ^ half for lane in range(LANES)])
            vector = combine(vector, swapped)
            half //= 2
        return vector

    def largest_magnitude(self, numbers: Sequence[Any]) -> Any:
        """Return the bits of the largest magnitude of vectors of float32, in every lane, as int32.

        As integers, magnitudes have the order of their bits, with infinity and NaN as the largest.
        """
        build, mask = self.builder, self.integer_constant(0x7FFFFFFF)
        magnitudes = [build.and_(build.bitcast(number, I32_VECTOR), mask) for number in numbers]
        return self.reduce(
            magnitudes, lambda a, b: build.select(build.icmp_signed(">", a, b), a, b)
        )

    def exp2(self, x: Any) -> Any:
        """Return ``2**x`` for ``x <= 0``. The result is at least ``2**-126``, and NaN stays NaN."""
        build = self.builder
        low = self.constant(-126.0)
        x = build.select(build.fcmp_ordered("<", x, low), low, x)
        shifted = build.fadd(x, self.constant(_MAGIC + 127))
        fraction = build.fsub(x, build.fsub(shifted, self.constant(_MAGIC + 127)))
        power = self.polynomial(fraction, _EXP2)
        exponent = build.shl(build.bitcast(shifted, I32_VECTOR), self.integer_constant(23))
        return build.fmul(power, build.bitcast(exponent, F32_VECTOR))

    def tanh(self, x: Any) -> Any:
        """Return ``tanh(x)`` with an error of a few units in the last place. NaN stays NaN.

        The result is Lambert's continued fraction near 0, elsewhere ``1 - 2 / (e**2x + 1)``.
        """
        build = self.builder
        sign = self.constant(-0.0)
        bits = build.and_(build.bitcast(x, I32_VECTOR), build.bitcast(sign, I32_VECTOR))
        size = self.absolute(x)
        decay = self.exp2(build.fmul(size, self.constant(-2 * LOG2E)))
        one = self.constant(1.0)
        far = build.fdiv(build.fsub(one, decay), build.fadd(one, decay))
        square = build.fmul(size, size)
        over = build.fmul(size, self.polynomial(square, (21.0, 1260.0, 10395.0)))
        near = build.fdiv(over, self.polynomial(square, (1.0, 210.0, 4725.0, 10395.0)))
        value = build.select(build.fcmp_ordered("<", size, self.constant(0.625)), near, far)
        return build.bitcast(build.or_(build.bitcast(value, I32_VECTOR), bits), F32_VECTOR)

    def polynomial(self, x: Any, coefficients: Sequence[float]) -> Any:
        """Evaluate a polynomial (highest power first) by Horner's rule."""
        value = self.constant(coefficients[0])
        for coefficient in coefficients[1:]:
            value = self.fma(value, x, self.constant(coefficient))
        return value

    def transpose(self, rows: list[Any]) -> list[Any]:
        """Transpose ``LANES`` vectors of ``LANES`` lanes in log2(LANES) rounds of shuffles."""
        rows = list(rows)
        half = 1
        while half < LANES:
            low = [LANES + lane - half if lane & half else lane for lane in range(LANES)]
            high = [lane + half for lane in low]
            for i in range(LANES):
                if not i & half:
                    a, b = rows[i], rows[i + half]
                    rows[i], rows[i + half] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            half *= 2
        return rows

    def loop(
        self,
        end: Any,
        emit_body: Callable[[Any, list[Any]], Sequence[Any]],
        carried: Sequence[Any] = (),
        start: Any = None,
        unroll: int = 1,
    ) -> list[Any]:
        """Emit a loop and return the carried values after its last iteration.

        The index runs from ``start`` (default 0) to ``end`` (exclusive). An iteration is emitted by
        ``emit_body(index, values)``, which returns the next values. ``carried`` are the values
        before the first iteration. ``unroll`` is the number of iterations per jump; it must divide
        their number.
        """
        build = self.builder
        before, head = build.block, build.append_basic_block("head")
        body, after = build.append_basic_block("body"), build.append_basic_block("after")
        build.branch(head)
        build.position_at_end(head)
        index = build.phi(I64)
        index.add_incoming(start or I64(0), before)
        phis = [build.phi(value.type) for value in carried]
        build.cbranch(build.icmp_signed("<", index, end), body, after)
        build.position_at_end(body)
        values = list(phis)
        for ahead in range(unroll):
            values = list(emit_body(build.add(index, I64(ahead)) if ahead else index, values))
        index.add_incoming(build.add(index, I64(unroll)), build.block)
        for phi, first, value in zip(phis, carried, values, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, build.block)
        build.branch(head)
        build.position_at_end(after)
        return phis

    def blocks(self, vectors: Any, block_vectors: int) -> Any:
        """Return ``vectors / block_vectors``, the number of blocks that the vectors form."""
        if block_vectors == 1:
            return vectors
        return self.builder.udiv(vectors, I64(block_vectors))

    def for_each(self, end: Any, emit_body: Callable[[Any], None], start: Any = None) -> None:
        """Emit a loop of ``emit_body(index)`` for the indices from ``start`` (0) to ``end``."""

        def emit(index: Any, carried: list[Any]) -> list[Any]:
            emit_body(index)
            return carried

        self.loop(end, emit, start=start)

    def switch(self, value: Any, cases: Sequence[int], emit_case: Callable[[int], None]) -> None:
        """Emit a branch on ``value`` to the code of ``emit_case(case)`` for each of ``cases``.

        For any other value, nothing is executed.
        """
        build = self.builder
        after = build.append_basic_block("after")
        chosen = build.switch(value, after)
        for case in cases:
            block = build.append_basic_block(f"case{case}")
            chosen.add_case(I64(case), block)
            build.position_at_end(block)
            emit_case(case)
            build.branch(after)
        build.position_at_end(after)

    def clamped(self, numbers: Sequence[int], count: Any) -> list[Any]:
        """Return the numbers as int64, those from ``count`` on replaced by ``count - 1``."""
        build = self.builder
        last = build.sub(count, I64(1))
        return [
            build.select(build.icmp_signed("<", I64(number), last), I64(number), last)
            for number in numbers
        ]

    def strided(self, address: Any, stride: Any, count: int) -> list[Any]:
        """Return ``count`` addresses from ``address`` on, ``stride`` bytes apart."""
        return [self.offset(address, I64(index), stride) for index in range(count)]

    def offset(self, address: Any, index: Any, stride: Any) -> Any:
        """Return ``address + index * stride``. ``stride`` is an LLVM value or an int."""
        step = I64(stride) if isinstance(stride, int) else stride
        return self.builder.add(address, self.builder.mul(index, step))

    def _pointer(self, address: Any, offset: int) -> Any:
        if offset:
            address = self.builder.add(address, I64(offset))
        return self.builder.inttoptr(address, POINTER)

    def declared(self, name: str, kind: Any) -> Any:
        """Return the LLVM intrinsic ``name``, and declare it in the module at the first use."""
        module = self.builder.module
        return module.globals.get(name) or ir.Function(module, kind, name)


def emitted(result: Any = types.void, **kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate as ``jit.emitted``, but a function whose first parameter is an ``Emitter``."""

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def with_builder(builder: Any, *values: Any) -> Any:
            return emit(Emitter(builder), *values)

        return jit.emitted(result, **kinds)(with_builder)

    return decorate
