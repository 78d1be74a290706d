"""Register tiles: the innermost products of ``gemm`` and of tiled attention.

A tile keeps the sums of several rows by several vectors of columns in registers, and adds one outer
product per step to them. Every sum is a chain of fused multiply-adds in an order that does not
depend on the shape of the tile. So the bits of a row do not depend on the other rows.

Addresses are int64, strides are in bytes, elements are float32.
"""

from __future__ import annotations

from typing import Any

from labkit.cpu.precision.pool_elements import element_type
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.simd.register_tile_sizes import HOST_REGISTERS, LANES
from labkit.cpu.simd.simd_emitter import FLOAT_BYTES, I64, VECTOR_BYTES, Emitter, emitted

# The tile of ``gemm``: rows of x, and vectors of a panel of packed weights.
GEMM_ROWS, GEMM_VECTORS = HOST_REGISTERS.tile(max_rows=8, max_vectors=2)
PANEL_ROW_BYTES = GEMM_VECTORS * VECTOR_BYTES  # bytes of a panel's columns at one step
# Number of panels by which a single row is multiplied at once, because one panel has too few sums
# to hide the latency of an FMA.
ROW_PANELS = 4

# Tiled attention: the tile of weighted values, and a smaller tile of scores, for which registers
# hold several chains of sums (``CHAINS``) at once.
TILE_ROWS, TILE_VECTORS = HOST_REGISTERS.tile(max_rows=4, max_vectors=4)
WIDE_COLUMNS = LANES * TILE_VECTORS  # columns of a wide tile of values
SCORE_ROWS = 2
SCORE_VECTORS = min(TILE_VECTORS, 2)
CHAINS = 4 if HOST_REGISTERS.lanes == LANES else 2
SPILL_BYTES = (
    SCORE_ROWS * SCORE_VECTORS * VECTOR_BYTES * ((LANES // CHAINS).bit_length() - 1)
)  # bytes of the sums that wait in memory


def _gemm(
    code: Emitter, rows: int, panels: int, operands: tuple[Any, ...], ahead: tuple[Any, Any] | None
) -> None:
    """Emit the product of ``rows`` rows of x and ``panels`` panels of weights.

    ``ahead`` is the address to prefetch from and its increment per step (bytes), or None for no
    prefetch.
    """
    x, x_row, panel, panel_bytes, depth, bias, out, out_row = operands
    sources, targets = code.strided(x, x_row, rows), code.strided(out, out_row, rows)
    places, width = code.strided(panel, panel_bytes, panels), panels * GEMM_VECTORS

    def step(k: Any, sums: list[Any]) -> list[Any]:
        if ahead is not None:
            next_line = code.offset(ahead[0], k, ahead[1])
            for line in range(0, max(PANEL_ROW_BYTES, CACHE_LINE_BYTES), CACHE_LINE_BYTES):
                code.prefetch(code.offset(next_line, I64(line), 1))
        weights = [
            code.load(code.offset(place, k, PANEL_ROW_BYTES), VECTOR_BYTES * vector)
            for place in places
            for vector in range(GEMM_VECTORS)
        ]
        return code.outer_product(
            [code.offset(row, k, FLOAT_BYTES) for row in sources], weights, sums
        )

    sums = [code.load(bias, VECTOR_BYTES * vector) for vector in range(width)] * rows
    even = code.builder.and_(depth, I64(~1))
    sums = code.loop(even, step, sums, unroll=2)
    sums = code.loop(depth, step, sums, start=even)
    for i, total in enumerate(sums):
        code.store(total, targets[i // width], VECTOR_BYTES * (i % width))


@emitted()
def gemm_tile(code, rows, x, x_row, panel, depth, bias, out, out_row, ahead, ahead_bytes):  # type: ignore[no-untyped-def]
    """Multiply ``rows`` rows of x (at most ``GEMM_ROWS``) by one panel, and add the bias.

    ``x_row`` and ``out_row`` are the strides of x and of the result (bytes). ``depth`` is the
    number of elements per row of x. ``ahead`` is the first address to prefetch, and
    ``ahead_bytes`` its increment per step.
    """
    operands = (x, x_row, panel, I64(0), depth, bias, out, out_row)

    def tile(height: int) -> None:
        _gemm(code, height, 1, operands, (ahead, ahead_bytes))

    code.switch(rows, range(1, GEMM_ROWS + 1), tile)


@emitted()
def gemm_row(code, x, panel, panel_bytes, depth, bias, out):  # type: ignore[no-untyped-def]
    """Multiply one row of x by ``ROW_PANELS`` panels, ``panel_bytes`` apart, and add the bias."""
    operands = (x, I64(0), panel, panel_bytes, depth, bias, out, I64(0))
    _gemm(code, 1, ROW_PANELS, operands, None)


def _tree_order(first: int = 0, step: int = 1) -> list[int]:
    """Return the order in which ``sum_lanes`` of decode attention adds the lanes of a vector."""
    if step == LANES:
        return [first]
    return _tree_order(first, 2 * step) + _tree_order(first + step, 2 * step)


@emitted()
def scores_tile(code, c, ldc, a, lda, b, ldb, steps, memory):  # type: ignore[no-untyped-def]
    """Write ``C = A @ B`` for a register tile, with the same sums as decode's ``dot_run``.

    C is [SCORE_ROWS, SCORE_VECTORS * LANES]. A [SCORE_ROWS, steps * LANES] is read one element at a
    time. B [LANES, steps, SCORE_VECTORS * LANES] was written by ``transpose_strip``. Each element
    of C is the tree sum of ``LANES`` chains of fused multiply-adds. Chain ``i`` has the products
    ``i``, ``i + LANES``, ... ``CHAINS`` chains at a time are computed in registers. Their sums are
    stored in ``memory`` until they are added: ``SPILL_BYTES`` bytes that start on a cache line,
    which the stack would not guarantee.
    """
    build, size = code.builder, SCORE_ROWS * SCORE_VECTORS
    targets, sources = code.strided(c, ldc, SCORE_ROWS), code.strided(a, lda, SCORE_ROWS)
    strip = build.mul(ldb, steps)

    def chains(lanes: list[int], place: int) -> list[Any]:
        strips = [code.offset(b, strip, I64(place + i)) for i in range(CHAINS)]

        def step(index: Any, sums: list[Any]) -> list[Any]:
            totals = []
            for i, lane in enumerate(lanes):
                line = code.offset(strips[i], index, ldb)
                columns = [code.load(line, VECTOR_BYTES * v) for v in range(SCORE_VECTORS)]
                offset = code.offset(I64(FLOAT_BYTES * lane), index, VECTOR_BYTES)
                factors = [build.add(row, offset) for row in sources]
                totals += code.outer_product(factors, columns, sums[i * size : (i + 1) * size])
            return totals

        sums: list[Any] = code.loop(steps, step, [code.constant(0.0)] * (size * CHAINS))
        while len(sums) > size:
            pairs = range(0, len(sums), 2 * size)
            sums = [
                build.fadd(sums[pair + i], sums[pair + size + i])
                for pair in pairs
                for i in range(size)
            ]
        return sums

    def tree(lanes: list[int], place: int = 0, depth: int = 0) -> list[Any]:
        if len(lanes) == CHAINS:
            return chains(lanes, place)
        half, spilled = len(lanes) // 2, VECTOR_BYTES * size * depth
        for i, left in enumerate(tree(lanes[:half], place, depth + 1)):
            code.store(left, memory, spilled + VECTOR_BYTES * i)
        return [
            build.fadd(code.load(memory, spilled + VECTOR_BYTES * i), right)
            for i, right in enumerate(tree(lanes[half:], place + half, depth + 1))
        ]

    for i, total in enumerate(tree(_tree_order())):
        code.store(total, targets[i // SCORE_VECTORS], VECTOR_BYTES * (i % SCORE_VECTORS))


def _add_weighted(rows: int, vectors: int) -> Any:
    """Return an intrinsic for ``C += A @ B`` with a register tile.

    C is [rows, vectors * LANES], A is [rows, depth] and read one element at a time, B is [depth,
    vectors * LANES]. Each element of C is one chain of fused multiply-adds along the depth.
    """

    @emitted()
    def add_weighted(code, c, ldc, a, lda, b, ldb, depth):  # type: ignore[no-untyped-def]
        targets, sources = code.strided(c, ldc, rows), code.strided(a, lda, rows)

        def step(index: Any, sums: list[Any]) -> Any:
            line = code.offset(b, index, ldb)
            columns = [code.load(line, VECTOR_BYTES * v) for v in range(vectors)]
            factors = [code.offset(row, index, FLOAT_BYTES) for row in sources]
            return code.outer_product(factors, columns, sums)

        sums = [code.load(target, VECTOR_BYTES * v) for target in targets for v in range(vectors)]
        for i, total in enumerate(code.loop(depth, step, sums)):
            code.store(total, targets[i // vectors], VECTOR_BYTES * (i % vectors))

    return add_weighted


add_weighted_tile_wide = _add_weighted(TILE_ROWS, TILE_VECTORS)
add_weighted_tile = _add_weighted(TILE_ROWS, 1)
add_weighted_row_wide = _add_weighted(1, TILE_VECTORS)
add_weighted_row = _add_weighted(1, 1)


@emitted(params=None)
def transpose_strip(code, params, rows, target, stride, vectors):  # type: ignore[no-untyped-def]
    """Write ``LANES`` rows as ``LANES`` columns, with the lanes in the order of ``_tree_order``.

    ``rows`` is the address of ``LANES`` int64 row addresses. A row has ``vectors`` vectors of the
    KV pools' element type. Lane ``_tree_order()[i]`` of vector ``j`` of all rows is written to
    ``target + (i * vectors + j) * stride``.
    """
    element = element_type(params)
    sources = [code.load(rows, 8 * lane, I64) for lane in range(LANES)]

    def transpose_block(block: Any) -> None:
        for v in range(element.block_vectors):
            index = block
            if element.block_vectors > 1:
                index = code.offset(I64(v), block, element.block_vectors)
            columns = code.transpose([element.load_vector(code, row, block, v) for row in sources])
            for nth, lane in enumerate(_tree_order()):
                line = code.offset(index, vectors, I64(nth))
                code.store(columns[lane], code.offset(target, line, stride))

    code.for_each(code.blocks(vectors, element.block_vectors), transpose_block)
