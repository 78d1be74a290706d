"""A small vocabulary of vector operations, written as LLVM IR.

numba has no vector type, and the auto-vectoriser neither keeps a register tile in
registers nor fixes the order of a sum. ``Emitter`` writes the instructions themselves;
``tiles`` builds the intrinsics from it. Every operation has one fixed order and no
fast-math, so that an element's value never depends on what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
POINTER = ir.PointerType()


def _vector_shape() -> tuple[int, int]:
    """Return (lanes of a vector, vectors in a register tile's row) for this machine.

    Four such rows must fit the registers: 32 of 16 floats with AVX-512, 16 of 8 floats
    with AVX, 32 of 4 floats elsewhere (NEON).
    """
    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 4
    if features.get("avx"):
        return 8, 2
    return 4, 4


LANES, VECTORS = _vector_shape()
VECTOR = ir.VectorType(F32, LANES)
INTEGERS = ir.VectorType(I32, LANES)
BYTES = 4 * LANES  # of a vector
LINE = 64  # bytes of a cache line

# 2**f for f in [-0.5, 0.5], highest power first: least squares of the relative error over
# Chebyshev nodes, which stays below 3e-9.
_EXP2 = (
    0.000153707048167041,
    0.0013399848290709115,
    0.00961837325135214,
    0.055503290351535756,
    0.240226484622812,
    0.6931472055770999,
    1.0,
)
_MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds a float32 to an integer in its low bits
_LOG2E = 1.4426950408889634


class Emitter:
    """Writes vector instructions at the builder's position; addresses are int64 bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def load(self, address: Any, offset: int = 0, kind: Any = VECTOR) -> Any:
        """Load a vector (or one element of ``kind``) from ``address + offset``."""
        return self.builder.load(self._pointer(address, offset), align=4, typ=kind)

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        """Store a vector or a scalar at ``address + offset``."""
        self.builder.store(value, self._pointer(address, offset), align=4)

    def prefetch(self, address: Any) -> None:
        """Ask for the cache line at ``address``, into the second level."""
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        function = self._declared("llvm.prefetch.p0", kind)
        self.builder.call(function, [self._pointer(address, 0), I32(0), I32(2), I32(1)])

    def constant(self, value: float) -> Any:
        """Return a vector of one constant."""
        return ir.Constant(VECTOR, [value] * LANES)

    def splat(self, scalar: Any) -> Any:
        """Return a vector of one scalar."""
        nothing = ir.Constant(VECTOR, ir.Undefined)
        one = self.builder.insert_element(nothing, scalar, I32(0))
        return self.shuffle(one, nothing, [0] * LANES)

    def first(self, vector: Any) -> Any:
        """Return lane 0."""
        return self.builder.extract_element(vector, I32(0))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return ``a * b + c``, rounded once."""
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        return self.builder.call(self._declared(f"llvm.fma.v{LANES}f32", kind), [a, b, c])

    def maximum(self, a: Any, b: Any) -> Any:
        """Return the larger of each lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def shuffle(self, a: Any, b: Any, lanes: Sequence[int]) -> Any:
        """Return the lanes chosen from ``a`` and then ``b``."""
        return self.builder.shuffle_vector(a, b, ir.Constant(INTEGERS, list(lanes)))

    def across(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine all lanes pairwise in one fixed tree; every lane holds the result."""
        half = LANES // 2
        while half:
            swapped = self.shuffle(vector, vector, [lane ^ half for lane in range(LANES)])
            vector = combine(vector, swapped)
            half //= 2
        return vector

    def exp2(self, x: Any) -> Any:
        """Return ``2**x`` for ``x <= 0``; below -126 it stays at ``2**-126``; NaN stays NaN."""
        build = self.builder
        low = self.constant(-126.0)
        x = build.select(build.fcmp_ordered("<", x, low), low, x)
        shifted = build.fadd(x, self.constant(_MAGIC + 127))
        fraction = build.fsub(x, build.fsub(shifted, self.constant(_MAGIC + 127)))
        power = self.polynomial(fraction, _EXP2)
        exponent = build.shl(build.bitcast(shifted, INTEGERS), ir.Constant(INTEGERS, [23] * LANES))
        return build.fmul(power, build.bitcast(exponent, VECTOR))

    def tanh(self, x: Any) -> Any:
        """Return ``tanh(x)`` to a few units in the last place; NaN stays NaN.

        Near 0 the continued fraction of Lambert, elsewhere ``1 - 2 / (e**2x + 1)``.
        """
        build = self.builder
        sign = self.constant(-0.0)
        bits = build.and_(build.bitcast(x, INTEGERS), build.bitcast(sign, INTEGERS))
        size = build.call(
            self._declared(f"llvm.fabs.v{LANES}f32", ir.FunctionType(VECTOR, [VECTOR])), [x]
        )
        decay = self.exp2(build.fmul(size, self.constant(-2 * _LOG2E)))
        one = self.constant(1.0)
        far = build.fdiv(build.fsub(one, decay), build.fadd(one, decay))
        square = build.fmul(size, size)
        over = build.fmul(size, self.polynomial(square, (21.0, 1260.0, 10395.0)))
        near = build.fdiv(over, self.polynomial(square, (1.0, 210.0, 4725.0, 10395.0)))
        value = build.select(build.fcmp_ordered("<", size, self.constant(0.625)), near, far)
        return build.bitcast(build.or_(build.bitcast(value, INTEGERS), bits), VECTOR)

    def polynomial(self, x: Any, coefficients: Sequence[float]) -> Any:
        """Evaluate a polynomial (highest power first) by Horner's rule."""
        value = self.constant(coefficients[0])
        for coefficient in coefficients[1:]:
            value = self.fma(value, x, self.constant(coefficient))
        return value

    def transpose(self, rows: list[Any]) -> list[Any]:
        """Transpose ``LANES`` vectors of ``LANES`` lanes, by halves of halves."""
        rows = list(rows)
        half = 1
        while half < LANES:
            take = [[], []]  # type: list[list[int]]
            for lane in range(LANES):
                low = not lane & half
                take[0].append(lane if low else LANES + lane - half)
                take[1].append(lane + half if low else LANES + lane)
            for i in range(LANES):
                if not i & half:
                    a, b = rows[i], rows[i + half]
                    rows[i], rows[i + half] = (self.shuffle(a, b, lanes) for lanes in take)
            half *= 2
        return rows

    def loop(
        self, count: Any, body: Callable[[Any, list[Any]], list[Any]], carried: list[Any]
    ) -> list[Any]:
        """Run ``body(index, carried) -> carried`` for ``index`` in 0 to ``count``.

        ``count`` is an int64 of at least 1; returns what the last turn left.
        """
        build = self.builder
        before = build.block
        turn = build.append_basic_block("turn")
        after = build.append_basic_block("after")
        build.branch(turn)
        build.position_at_end(turn)
        index = build.phi(I64)
        index.add_incoming(I64(0), before)
        phis = [build.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, before)
        values = body(index, phis)
        following = build.add(index, I64(1))
        index.add_incoming(following, build.block)
        for phi, value in zip(phis, values, strict=True):
            phi.add_incoming(value, build.block)
        build.cbranch(build.icmp_signed("<", following, count), turn, after)
        build.position_at_end(after)
        return values

    def apart(self, address: Any, stride: Any, count: int) -> list[Any]:
        """Return ``count`` addresses, ``stride`` bytes apart."""
        build = self.builder
        return [build.add(address, build.mul(stride, I64(index))) for index in range(count)]

    def _pointer(self, address: Any, offset: int) -> Any:
        if offset:
            address = self.builder.add(address, I64(offset))
        return self.builder.inttoptr(address, POINTER)

    def _declared(self, name: str, kind: Any) -> Any:
        """Return the LLVM intrinsic ``name``, declared in the module once."""
        module = self.builder.module
        return module.globals.get(name) or ir.Function(module, kind, name)
