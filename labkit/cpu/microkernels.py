"""Register tiles: the products of ``gemm`` and of tiled attention.

A tile keeps the sums of some rows by some vectors of columns in registers and adds outer products
to them, one per step. Every sum is a chain of fused multiply-adds in one order, whatever the
tile's shape, so that a row's bits depend on nothing beside it.

Addresses are int64 bytes, strides are bytes, elements float32.
"""

from __future__ import annotations

from typing import Any

from numba import types

from labkit.cpu.half_precision import element_of
from labkit.cpu.jit import intrinsic
from labkit.cpu.simd_emitter import CACHE_LINE_BYTES, FLOAT_BYTES, I64, VECTOR_BYTES, Emitter
from labkit.cpu.vector_registers import HOST_REGISTERS, LANES

# Of gemm: rows of a tile, and vectors of a panel of packed weights.
GEMM_ROWS, GEMM_VECTORS = HOST_REGISTERS.tile(rows=8, vectors=2)
PANEL_ROW = GEMM_VECTORS * VECTOR_BYTES  # bytes
# A single row has too few sums to hide the latency of an FMA: four panels at once.
ROW_PANELS = 4

# Of tiled attention: its values by tiles so high and so wide; its scores by smaller ones, of
# which several chains are in registers at once.
ROWS, VECTORS = HOST_REGISTERS.tile(rows=4, vectors=4)
WIDE = LANES * VECTORS  # columns of a wide tile
PAIR = 2  # rows of a tile of scores
SCORED = min(VECTORS, 2)  # and vectors
CHAINS = 4 if HOST_REGISTERS.lanes == LANES else 2
WAITING = (
    PAIR * SCORED * VECTOR_BYTES * ((LANES // CHAINS).bit_length() - 1)
)  # bytes of waiting sums


def _gemm(
    code: Emitter, rows: int, panels: int, operands: tuple[Any, ...], ahead: tuple[Any, Any] | None
) -> None:
    """Write a tile of rows of x by panels of weights, and the prefetch of what comes next."""
    x, x_row, panel, panel_bytes, depth, bias, out, out_row = operands
    sources, targets = code.apart(x, x_row, rows), code.apart(out, out_row, rows)
    places, width = code.apart(panel, panel_bytes, panels), panels * GEMM_VECTORS

    def step(k: Any, sums: list[Any]) -> list[Any]:
        if ahead is not None:
            following = code.at(ahead[0], k, ahead[1])
            for line in range(0, max(PANEL_ROW, CACHE_LINE_BYTES), CACHE_LINE_BYTES):
                code.prefetch(code.at(following, I64(line), 1))
        weights = [
            code.load(code.at(place, k, PANEL_ROW), VECTOR_BYTES * vector)
            for place in places
            for vector in range(GEMM_VECTORS)
        ]
        return code.outer([code.at(row, k, FLOAT_BYTES) for row in sources], weights, sums)

    sums = [code.load(bias, VECTOR_BYTES * vector) for vector in range(width)] * rows
    even = code.builder.and_(depth, I64(~1))
    sums = code.loop(even, step, sums, unroll=2)
    sums = code.loop(depth, step, sums, start=even)
    for i, total in enumerate(sums):
        code.store(total, targets[i // width], VECTOR_BYTES * (i % width))


@intrinsic
def gemm_tile(
    typing_context: Any,
    rows: Any,
    x: Any,
    x_row: Any,
    panel: Any,
    depth: Any,
    bias: Any,
    out: Any,
    out_row: Any,
    ahead: Any,
    ahead_bytes: Any,
) -> Any:
    """Multiply ``rows`` rows of x, at most ``GEMM_ROWS``, with one panel, and add the bias.

    ``x_row``, ``out_row``: bytes of a row of x and of the result; ``depth``: numbers in a row of
    x; ``ahead``, ``ahead_bytes``: what to prefetch first, and bytes to the next prefetch.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        rows, x, x_row, panel, *rest, ahead, ahead_bytes = arguments
        operands = (x, x_row, panel, I64(0), *rest)

        def tile(height: int) -> None:
            _gemm(code, height, 1, operands, (ahead, ahead_bytes))

        code.switch(rows, range(1, GEMM_ROWS + 1), tile)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), emit


@intrinsic
def gemm_row(
    typing_context: Any, x: Any, panel: Any, panel_bytes: Any, depth: Any, bias: Any, out: Any
) -> Any:
    """Multiply one row of x with ``ROW_PANELS`` panels, which are read once and in order."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, panel, panel_bytes, depth, bias, out = arguments
        operands = (x, I64(0), panel, panel_bytes, depth, bias, out, I64(0))
        _gemm(Emitter(builder), 1, ROW_PANELS, operands, None)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


def _visited(first: int = 0, step: int = 1) -> list[int]:
    """Return the lanes in the order in which a tree of neighbours' neighbours adds them."""
    if step == LANES:
        return [first]
    return _visited(first, 2 * step) + _visited(first + step, 2 * step)


@intrinsic
def scores_tile(
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
    """Write ``C = A @ B`` on a register tile, summed as decode's ``dots`` and ``add_lanes`` do.

    C is [PAIR, SCORED * LANES], A [PAIR, steps * LANES] read one element at a time, B [LANES,
    steps, SCORED * LANES] as ``transpose_strip`` leaves it. Each element is a chain of fused
    multiply-adds for each lane, ``LANES`` elements apart, and the tree of the chains' sums.
    ``CHAINS`` of them are added up in registers; their sums wait in ``memory``: ``WAITING``
    bytes on a cache line, for the stack would have them across two.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, size = Emitter(builder), PAIR * SCORED
        c, ldc, a, lda, b, ldb, steps, memory = arguments
        targets, sources = code.apart(c, ldc, PAIR), code.apart(a, lda, PAIR)
        strip = builder.mul(ldb, steps)

        def chains(lanes: list[int], place: int) -> list[Any]:
            strips = [code.at(b, strip, I64(place + i)) for i in range(CHAINS)]

            def step(index: Any, sums: list[Any]) -> list[Any]:
                following = []
                for i, lane in enumerate(lanes):
                    line = code.at(strips[i], index, ldb)
                    columns = [code.load(line, VECTOR_BYTES * v) for v in range(SCORED)]
                    offset = code.at(I64(FLOAT_BYTES * lane), index, VECTOR_BYTES)
                    factors = [builder.add(row, offset) for row in sources]
                    following += code.outer(factors, columns, sums[i * size : (i + 1) * size])
                return following

            sums = code.loop(steps, step, [code.constant(0.0)] * (size * CHAINS))
            while len(sums) > size:
                pairs = range(0, len(sums), 2 * size)
                sums = [
                    builder.fadd(sums[pair + i], sums[pair + size + i])
                    for pair in pairs
                    for i in range(size)
                ]
            return sums

        def tree(lanes: list[int], place: int = 0, depth: int = 0) -> list[Any]:
            if len(lanes) == CHAINS:
                return chains(lanes, place)
            half, waiting = len(lanes) // 2, VECTOR_BYTES * size * depth
            for i, left in enumerate(tree(lanes[:half], place, depth + 1)):
                code.store(left, memory, waiting + VECTOR_BYTES * i)
            return [
                builder.fadd(code.load(memory, waiting + VECTOR_BYTES * i), right)
                for i, right in enumerate(tree(lanes[half:], place + half, depth + 1))
            ]

        for i, total in enumerate(tree(_visited())):
            code.store(total, targets[i // SCORED], VECTOR_BYTES * (i % SCORED))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


def _values(rows: int, vectors: int) -> Any:
    """Return an intrinsic for ``C += A @ B`` on a register tile.

    C is [rows, vectors * LANES], A [rows, depth] read one element at a time, B [depth,
    vectors * LANES]. Each element is one chain of fused multiply-adds in the order of
    the depth.
    """

    @intrinsic
    def values(
        typing_context: Any, c: Any, ldc: Any, a: Any, lda: Any, b: Any, ldb: Any, depth: Any
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = Emitter(builder)
            c, ldc, a, lda, b, ldb, depth = arguments
            targets, sources = code.apart(c, ldc, rows), code.apart(a, lda, rows)

            def step(index: Any, sums: list[Any]) -> list[Any]:
                line = code.at(b, index, ldb)
                columns = [code.load(line, VECTOR_BYTES * v) for v in range(vectors)]
                factors = [code.at(row, index, FLOAT_BYTES) for row in sources]
                return code.outer(factors, columns, sums)

            sums = [
                code.load(target, VECTOR_BYTES * v) for target in targets for v in range(vectors)
            ]
            for i, total in enumerate(code.loop(depth, step, sums)):
                code.store(total, targets[i // vectors], VECTOR_BYTES * (i % vectors))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), emit

    return values


values_rows_wide = _values(ROWS, VECTORS)
values_rows = _values(ROWS, 1)
values_row_wide = _values(1, VECTORS)
values_row = _values(1, 1)


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

        def turn(index: Any) -> None:
            places = [code.at(row, index, element.vector_bytes) for row in sources]
            block = code.transpose([element.load(code, place) for place in places])
            for nth, lane in enumerate(_visited()):
                line = code.at(index, vectors, I64(nth))
                code.store(block[lane], code.at(target, line, stride))

        code.each(vectors, turn)
        return context.get_dummy_value()

    return types.void(layer, *[types.int64] * 4), emit
