"""The products of the decode kernel: keys and values as they lie in memory, each read once.

Addresses are int64 bytes, strides are bytes, elements float32, but for the pools', whose type
is the layer's.
"""

from __future__ import annotations

from typing import Any

from numba import types

from labkit.engine.cpu.halves import element_of
from labkit.engine.cpu.jit import intrinsic
from labkit.engine.cpu.simd import BYTES, F32, I64, LANES, Emitter

RUN = 4  # keys or values side by side that are taken at once


def _dots(rows: int, keys: int) -> Any:
    """Return an intrinsic that multiplies ``rows`` queries with ``keys`` keys, lane by lane.

    Queries lie ``width`` bytes apart, keys ``stride``. The sums of row ``r`` and key ``k``
    go to ``sums + r * pitch``, ``k`` vectors on: lane ``i`` is one chain over every
    ``LANES``-th element from ``i`` on. Meanwhile as many keys are prefetched from
    ``ahead`` on, ``RUN`` keys apart.
    """

    @intrinsic
    def dots(
        typing_context: Any,
        layer: Any,
        sums: Any,
        pitch: Any,
        queries: Any,
        width: Any,
        key: Any,
        stride: Any,
        vectors: Any,
        ahead: Any,
    ) -> Any:
        element = element_of(layer)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Emitter(builder)
            _, sums, pitch, queries, width, key, stride, vectors, ahead = arguments
            targets, sources = code.apart(sums, pitch, rows), code.apart(queries, width, rows)
            places = code.apart(key, stride, keys)
            nexts = code.apart(ahead, builder.mul(stride, I64(RUN)), keys)

            def turn(index: Any, totals: list[Any]) -> list[Any]:
                offset = builder.mul(index, I64(BYTES))
                stored = builder.mul(index, I64(element.vector_bytes))
                for following in nexts:
                    code.prefetch(builder.add(following, stored))
                vectors = [element.load(code, builder.add(place, stored)) for place in places]
                following = []
                for row, source in enumerate(sources):
                    query = code.load(builder.add(source, offset))
                    for k, vector in enumerate(vectors):
                        following.append(code.fma(query, vector, totals[row * keys + k]))
                return following

            totals = code.loop(vectors, turn, [code.constant(0.0)] * (rows * keys))
            for i, total in enumerate(totals):
                code.store(total, targets[i // keys], BYTES * (i % keys))
            return context.get_dummy_value()

        return types.void(layer, *[types.int64] * 8), emit

    return dots


def _spread(rows: int, keys: int) -> Any:
    """Return an intrinsic that adds ``keys`` weighted values to ``rows`` rows of sums.

    Values lie ``stride`` bytes apart, rows ``width``, their weights ``pitch``; a row takes
    the values in order. Meanwhile as many values are prefetched from ``ahead`` on, ``RUN``
    values apart.
    """

    @intrinsic
    def spread(
        typing_context: Any,
        layer: Any,
        sums: Any,
        width: Any,
        weights: Any,
        pitch: Any,
        value: Any,
        stride: Any,
        vectors: Any,
        ahead: Any,
    ) -> Any:
        element = element_of(layer)

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Emitter(builder)
            _, sums, width, weights, pitch, value, stride, vectors, ahead = arguments
            targets, sources = code.apart(sums, width, rows), code.apart(weights, pitch, rows)
            places = code.apart(value, stride, keys)
            nexts = code.apart(ahead, builder.mul(stride, I64(RUN)), keys)
            factors = [
                [code.splat(code.load(source, 4 * k, F32)) for k in range(keys)]
                for source in sources
            ]

            def turn(index: Any, carried: list[Any]) -> list[Any]:
                offset = builder.mul(index, I64(BYTES))
                stored = builder.mul(index, I64(element.vector_bytes))
                for following in nexts:
                    code.prefetch(builder.add(following, stored))
                vectors = [element.load(code, builder.add(place, stored)) for place in places]
                for target, weights in zip(targets, factors, strict=True):
                    there = builder.add(target, offset)
                    total = code.load(there)
                    for weight, vector in zip(weights, vectors, strict=True):
                        total = code.fma(weight, vector, total)
                    code.store(total, there)
                return []

            code.loop(vectors, turn, [])
            return context.get_dummy_value()

        return types.void(layer, *[types.int64] * 8), emit

    return spread


dots_4, dots_2, dots_1 = _dots(4, RUN), _dots(2, RUN), _dots(1, RUN)
spreads_4, spreads_2, spreads_1 = _spread(4, RUN), _spread(2, RUN), _spread(1, RUN)
# Of the few keys that are left over, one with one row at a time.
dot_1, spread_1 = _dots(1, 1), _spread(1, 1)


@intrinsic
def add_lanes(typing_context: Any, scores: Any, sums: Any) -> Any:
    """Write the sums of the lanes of ``LANES`` vectors side by side, each by the same tree."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        scores, sums = arguments
        vectors = [code.load(sums, BYTES * i) for i in range(LANES)]
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
