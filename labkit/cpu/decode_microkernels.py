"""The products of the decode kernel: keys and values as they lie in memory, each read once.

Addresses are int64 bytes, strides are bytes, elements float32, but for the pools', whose type
is the layer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from labkit.cpu.half_precision import Element, element_of
from labkit.cpu.jit import intrinsic
from labkit.cpu.simd_emitter import F32, FLOAT_BYTES, I64, VECTOR_BYTES, Emitter
from labkit.cpu.vector_registers import HOST_REGISTERS, LANES

RUN = 4  # keys or values side by side that are taken at once
ROWS = HOST_REGISTERS.rows(RUN, most=4)  # query rows that are, at most


class _Keys:
    """``count`` keys or values from an address on, vector by vector, and those to prefetch."""

    def __init__(
        self, code: Emitter, element: Element, count: int, key: Any, stride: Any, ahead: Any
    ) -> None:
        self.code, self.element, self.count = code, element, count
        self._places = code.apart(key, stride, count)
        self._nexts = code.apart(ahead, code.builder.mul(stride, I64(RUN)), count)

    def load(self, index: Any) -> list[Any]:
        """Load a vector of each as float32, and ask for one of each that comes next."""
        code, size = self.code, self.element.vector_bytes
        for following in self._nexts:
            code.prefetch(code.at(following, index, size))
        return [self.element.load(code, code.at(place, index, size)) for place in self._places]


def _intrinsic(
    write: Callable[[Emitter, int, _Keys, Any, list[Any]], None], keys: int, most: int
) -> Any:
    """Return an intrinsic for 1 to ``most`` rows of queries and so many keys or values.

    Keys lie ``stride`` bytes apart. Meanwhile as many are prefetched from ``ahead`` on, ``RUN``
    keys apart.
    """

    @intrinsic
    def product(
        typing_context: Any,
        layer: Any,
        rows: Any,
        sums: Any,
        pitch: Any,
        other: Any,
        width: Any,
        key: Any,
        stride: Any,
        vectors: Any,
        ahead: Any,
    ) -> Any:
        element = element_of(layer)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Emitter(builder)
            _, rows, *addresses, key, stride, vectors, ahead = arguments

            def rows_of(height: int) -> None:
                block = _Keys(code, element, keys, key, stride, ahead)
                write(code, height, block, vectors, addresses)

            code.switch(rows, range(1, most + 1), rows_of)
            return context.get_dummy_value()

        return types.void(layer, *[types.int64] * 9), emit

    return product


def _dots(code: Emitter, rows: int, keys: _Keys, vectors: Any, addresses: list[Any]) -> None:
    """Multiply queries, ``width`` bytes apart, with keys, lane by lane.

    The sums of row ``r`` and key ``k`` go to ``sums + r * pitch``, ``k`` vectors on: lane ``i``
    is one chain over every ``LANES``-th element from ``i`` on.
    """
    sums, pitch, queries, width = addresses
    targets, sources = code.apart(sums, pitch, rows), code.apart(queries, width, rows)

    def turn(index: Any, totals: list[Any]) -> list[Any]:
        vectors, following = keys.load(index), []
        for row, source in enumerate(sources):
            query = code.load(code.at(source, index, VECTOR_BYTES))
            for k, vector in enumerate(vectors):
                following.append(code.fma(query, vector, totals[row * keys.count + k]))
        return following

    totals = code.loop(vectors, turn, [code.constant(0.0)] * (rows * keys.count))
    for i, total in enumerate(totals):
        code.store(total, targets[i // keys.count], VECTOR_BYTES * (i % keys.count))


def _spread(code: Emitter, rows: int, keys: _Keys, vectors: Any, addresses: list[Any]) -> None:
    """Add weighted values to rows of sums, ``pitch`` bytes apart, each in the values' order.

    The weights of a row lie side by side, those of the next row ``width`` bytes on.
    """
    sums, pitch, weights, width = addresses
    targets, sources = code.apart(sums, pitch, rows), code.apart(weights, width, rows)
    factors = [
        [code.splat(code.load(source, FLOAT_BYTES * k, F32)) for k in range(keys.count)]
        for source in sources
    ]

    def turn(index: Any) -> None:
        vectors = keys.load(index)
        for target, weights in zip(targets, factors, strict=True):
            there = code.at(target, index, VECTOR_BYTES)
            total = code.load(there)
            for weight, vector in zip(weights, vectors, strict=True):
                total = code.fma(weight, vector, total)
            code.store(total, there)

    code.each(vectors, turn)


dots, spreads = _intrinsic(_dots, RUN, ROWS), _intrinsic(_spread, RUN, ROWS)
# Of the few keys that are left over, one with one row at a time.
dot, spread = _intrinsic(_dots, 1, 1), _intrinsic(_spread, 1, 1)


@intrinsic
def add_lanes(typing_context: Any, scores: Any, sums: Any) -> Any:
    """Write the sums of the lanes of ``LANES`` vectors side by side, each by the same tree."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        scores, sums = arguments
        vectors = [code.load(sums, VECTOR_BYTES * i) for i in range(LANES)]
        width = LANES // 2  # lanes of a key that are left after this turn
        while width:
            low = [i // width * 2 * width + i % width for i in range(LANES)]
            high = [i + width for i in low]
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [
                builder.fadd(code.shuffle(a, b, low), code.shuffle(a, b, high)) for a, b in pairs
            ]
            width //= 2
        code.store(vectors[0], scores)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), emit
