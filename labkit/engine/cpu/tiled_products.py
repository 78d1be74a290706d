"""The products of the tiled kernel: register tiles of rows by packed keys and values.

Addresses are int64 bytes, strides are bytes, elements float32.
"""

from __future__ import annotations

from typing import Any

from numba import types

from labkit.engine.cpu.halves import element_of
from labkit.engine.cpu.jit import intrinsic
from labkit.engine.cpu.simd import BYTES, F32, I64, LANES, VECTORS, Emitter

ROWS = 4  # query rows of a register tile
WIDE = LANES * VECTORS  # columns of a wide tile
WAITING = ROWS * VECTORS * BYTES * (LANES.bit_length() - 1)  # bytes of a tile's waiting sums


def _visited(first: int = 0, step: int = 1) -> list[int]:
    """Return the lanes in the order in which a tree of neighbours' neighbours adds them."""
    if step == LANES:
        return [first]
    return _visited(first, 2 * step) + _visited(first + step, 2 * step)


def _scores(rows: int, vectors: int) -> Any:
    """Return an intrinsic for ``C = A @ B`` on a register tile, summed as ``dots`` does.

    C is [rows, vectors * LANES], A [rows, steps * LANES] read one element at a time, B
    [LANES, steps, vectors * LANES] as ``transpose_strip`` leaves it. Each element is a
    chain of fused multiply-adds for each lane, ``LANES`` elements apart, and the tree of
    the chains' sums, which wait in ``memory``: ``WAITING`` bytes on a cache line, for the
    stack would have them across two.
    """

    @intrinsic
    def scores(
        typing_context: Any,
        c: Any,
        ldc: Any,
        a: Any,
        lda: Any,
        b: Any,
        ldb: Any,
        steps: Any,
        memory: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Emitter(builder)
            c, ldc, a, lda, b, ldb, steps, memory = arguments
            a_rows = [builder.add(a, builder.mul(lda, I64(row))) for row in range(rows)]

            def chain(lane: int, place: int) -> list[Any]:
                columns_at = builder.add(b, builder.mul(builder.mul(ldb, steps), I64(place)))

                def turn(index: Any, sums: list[Any]) -> list[Any]:
                    b_row = builder.add(columns_at, builder.mul(ldb, index))
                    columns = [code.load(b_row, BYTES * v) for v in range(vectors)]
                    offset = builder.add(builder.mul(index, I64(BYTES)), I64(4 * lane))
                    following = []
                    for row in range(rows):
                        element = builder.add(a_rows[row], offset)
                        factor = code.splat(code.load(element, kind=F32))
                        for v in range(vectors):
                            following.append(code.fma(factor, columns[v], sums[row * vectors + v]))
                    return following

                return code.loop(steps, turn, [code.constant(0.0)] * (rows * vectors))

            def tree(lanes: list[int], place: int = 0, depth: int = 0) -> list[Any]:
                if len(lanes) == 1:
                    return chain(lanes[0], place)
                half, size = len(lanes) // 2, rows * vectors
                for i, left in enumerate(tree(lanes[:half], place, depth + 1)):
                    code.store(left, memory, BYTES * (depth * size + i))
                sums = tree(lanes[half:], place + half, depth + 1)
                return [
                    builder.fadd(code.load(memory, BYTES * (depth * size + i)), right)
                    for i, right in enumerate(sums)
                ]

            for i, total in enumerate(tree(_visited())):
                target = builder.add(c, builder.mul(ldc, I64(i // vectors)))
                code.store(total, target, BYTES * (i % vectors))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), emit

    return scores


def _values(rows: int, vectors: int) -> Any:
    """Return an intrinsic for ``C += A @ B`` on a register tile.

    C is [rows, vectors * LANES], A [rows, depth] read one element at a time, B [depth,
    vectors * LANES]. Each element is one chain of fused multiply-adds in the order of
    the depth, whatever the shape of the tile.
    """

    @intrinsic
    def values(
        typing_context: Any, c: Any, ldc: Any, a: Any, lda: Any, b: Any, ldb: Any, depth: Any
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Emitter(builder)
            c, ldc, a, lda, b, ldb, depth = arguments
            c_rows = [builder.add(c, builder.mul(ldc, I64(row))) for row in range(rows)]
            a_rows = [builder.add(a, builder.mul(lda, I64(row))) for row in range(rows)]
            start = [code.load(row, BYTES * v) for row in c_rows for v in range(vectors)]

            def turn(index: Any, sums: list[Any]) -> list[Any]:
                b_row = builder.add(b, builder.mul(ldb, index))
                step = builder.mul(index, I64(4))
                columns = [code.load(b_row, BYTES * v) for v in range(vectors)]
                following = []
                for row in range(rows):
                    factor = code.splat(code.load(builder.add(a_rows[row], step), kind=F32))
                    for v in range(vectors):
                        following.append(code.fma(factor, columns[v], sums[row * vectors + v]))
                return following

            sums = code.loop(depth, turn, start)
            for row in range(rows):
                for v in range(vectors):
                    code.store(sums[row * vectors + v], c_rows[row], BYTES * v)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), emit

    return values


scores_4 = _scores(ROWS, VECTORS)
scores_1 = _scores(1, VECTORS)
values_4_wide = _values(ROWS, VECTORS)
values_4 = _values(ROWS, 1)
values_1_wide = _values(1, VECTORS)
values_1 = _values(1, 1)


@intrinsic
def transpose_strip(
    typing_context: Any, layer: Any, rows: Any, target: Any, stride: Any, vectors: Any
) -> Any:
    """Write ``LANES`` rows as ``LANES`` columns, sorted by lane in the order of ``_visited``.

    ``rows`` is the address of ``LANES`` int64 row addresses; a row has ``vectors``
    vectors of what the layer's pools hold; lane ``_visited()[i]`` of vector ``j`` goes to
    ``target + (i * vectors + j) * stride``.
    """
    element = element_of(layer)

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        _, rows, target, stride, vectors = arguments
        sources = [code.load(rows, 8 * lane, I64) for lane in range(LANES)]

        def turn(index: Any, carried: list[Any]) -> list[Any]:
            offset = builder.mul(index, I64(element.vector_bytes))
            block = code.transpose(
                [element.load(code, builder.add(row, offset)) for row in sources]
            )
            for place, lane in enumerate(_visited()):
                line = builder.add(builder.mul(vectors, I64(place)), index)
                code.store(block[lane], builder.add(target, builder.mul(stride, line)))
            return []

        code.loop(vectors, turn, [])
        return context.get_dummy_value()

    return types.void(layer, *[types.int64] * 4), emit
