"""The kernel of the matrix product x[M, K] @ W[N, K].T + bias, and its register tile.

Weights are packed once into panels of a tile's width, each [K, width].  A tile walks K once and
adds one outer product per step, so every output number is the chain
``fma(x[k], w[k], previous)`` over k = 0, 1, ... whatever the number of rows, the tile
that held it or the thread: a row's bits do not depend on its batch.  (The design is that
of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008,
without the packing of x: it is small here.)

The tile is LLVM IR of our own, since loop vectorisation would not promise that order.
While a tile works on one panel it asks memory for the next: at 8 to 32 rows the product
is as fast as the arithmetic although the weights come from memory.

All of it is one file because numba's cache notices changes of the caller's file alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from labkit.engine.cpu.registers import register_tile
from labkit.machine import pool

TILE = register_tile()
LANES = TILE.lanes
ROWS = TILE.rows
WIDTH = TILE.columns
# A single row has too few accumulators to hide the latency of an FMA: four panels at once.
QUAD = 4
# Rows that share one pass over the weights: their part of x stays in the second-level cache.
ROW_BLOCK = 256
# A product smaller than this many multiplications costs less than a thread hand-off;
# reading a weight costs as much as some of them.
SERIAL_BELOW = 1 << 19
WEIGHT_COST = 8
FLOAT_BYTES = 4
PANEL_ROW = WIDTH * FLOAT_BYTES
CACHE_LINE = 64


class _TileEmitter:
    """Emits the loop over K of a tile; step k prefetches from ``ahead + k * ahead_bytes``."""

    def __init__(self, builder: Any, panels: int, ahead: Any, ahead_bytes: Any) -> None:
        self.b = builder
        self.ahead = ahead
        self.ahead_bytes = ahead_bytes
        self.count = panels * TILE.vectors
        self.int = ir.IntType(64)
        self.vector = ir.VectorType(ir.FloatType(), LANES)
        self.fma = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(self.vector, [self.vector] * 3),
            f"llvm.fma.v{LANES}f32",
        )

    def const(self, value: int) -> Any:
        return ir.Constant(self.int, value)

    def shift(self, address: Any, count: int) -> Any:
        """Return the address ``count`` vectors further."""
        return self.b.add(address, self.const(count * LANES * FLOAT_BYTES))

    def load(self, address: Any, kind: Any) -> Any:
        value = self.b.load(self.b.inttoptr(address, kind.as_pointer()))
        value.align = FLOAT_BYTES
        return value

    def store(self, value: Any, address: Any) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = FLOAT_BYTES

    def splat(self, scalar: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        lane = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        one = self.b.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return self.b.shuffle_vector(one, undefined, lane)

    def prefetch(self, address: Any) -> None:
        """Ask for the cache line of an address; any address may be asked for."""
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        # To read, into the second-level cache, as data.
        flags = [ir.Constant(number, flag) for flag in (0, 2, 1)]
        self.b.call(function, [self.b.inttoptr(address, pointer), *flags])

    def step(self, k: Any, rows: list[Any], panels: list[Any], sums: list[Any]) -> list[Any]:
        """Add the outer product of column k of x and row k of the panels."""
        lines = max(1, PANEL_ROW // CACHE_LINE) if self.ahead is not None else 0
        for line in range(lines):
            nth = self.b.add(self.b.mul(k, self.ahead_bytes), self.const(line * CACHE_LINE))
            self.prefetch(self.b.add(self.ahead, nth))
        at = self.b.mul(k, self.const(PANEL_ROW))
        weights = [
            self.load(self.shift(self.b.add(panel, at), vector), self.vector)
            for panel in panels
            for vector in range(TILE.vectors)
        ]
        column = self.b.mul(k, self.const(FLOAT_BYTES))
        result = []
        for row, address in enumerate(rows):
            x = self.splat(self.load(self.b.add(address, column), ir.FloatType()))
            for j, w in enumerate(weights):
                result.append(self.b.call(self.fma, [x, w, sums[row * self.count + j]]))
        return result

    def loop(self, depth: Any, rows: list[Any], panels: list[Any], sums: list[Any]) -> list[Any]:
        """Run the steps 0 .. depth-1, two at a time and a last odd one."""
        even = self.b.and_(depth, self.const(~1))
        sums = self._counted(even, self.const(0), rows, panels, sums, unroll=2)
        return self._counted(depth, even, rows, panels, sums, unroll=1)

    def _counted(
        self, end: Any, start: Any, rows: Any, panels: Any, sums: list[Any], unroll: int
    ) -> list[Any]:
        before = self.b.basic_block
        head = self.b.append_basic_block("k.head")
        body = self.b.append_basic_block("k.body")
        after = self.b.append_basic_block("k.after")
        self.b.branch(head)
        self.b.position_at_end(head)
        k = self.b.phi(self.int)
        k.add_incoming(start, before)
        carried = [self.b.phi(self.vector) for _ in sums]
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, before)
        self.b.cbranch(self.b.icmp_signed("<", k, end), body, after)
        self.b.position_at_end(body)
        updated: list[Any] = list(carried)
        for ahead in range(unroll):
            updated = self.step(self.b.add(k, self.const(ahead)), rows, panels, updated)
        k.add_incoming(self.b.add(k, self.const(unroll)), body)
        for phi, value in zip(carried, updated, strict=True):
            phi.add_incoming(value, body)
        self.b.branch(head)
        self.b.position_at_end(after)
        return list(carried)


def _tile(rows: int, panels: int = 1) -> Any:
    """Return a tile of a number of rows and of panels of WIDTH columns.

    Arguments, addresses or counts (int64): x and bytes of its row, the first panel and
    bytes of a panel, depth, bias, the result and bytes of its row, what to prefetch
    first and bytes to the next prefetch.
    """

    @intrinsic
    def tile(_typing, x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes):  # type: ignore[no-untyped-def]
        signature = types.void(*[types.int64] * 10)

        def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            x, x_row, panel, panel_bytes, depth, bias, out, out_row, *ahead = arguments
            # Several panels are read once and in order, which the hardware foresees.
            e = _TileEmitter(builder, panels, *(ahead if panels == 1 else (None, None)))
            row_at, panel_at, out_at = [x], [panel], [out]
            for _ in range(rows - 1):
                row_at.append(builder.add(row_at[-1], x_row))
                out_at.append(builder.add(out_at[-1], out_row))
            for _ in range(panels - 1):
                panel_at.append(builder.add(panel_at[-1], panel_bytes))
            first = [e.load(e.shift(bias, j), e.vector) for j in range(e.count)]
            sums = e.loop(depth, row_at, panel_at, first * rows)
            for i, value in enumerate(sums):
                e.store(value, e.shift(out_at[i // e.count], i % e.count))
            return context.get_dummy_value()

        return signature, emit

    return tile


_tile1, _tile2, _tile3, _tile4 = _tile(1), _tile(2), _tile(3), _tile(4)
# Where the registers hold fewer rows, the larger tiles are never asked for.
_tile5 = _tile(min(5, ROWS))
_tile6 = _tile(min(6, ROWS))
_tile7 = _tile(min(7, ROWS))
_tile8 = _tile(min(8, ROWS))
_quad = _tile(1, QUAD)


@njit(inline="always")
def _rows(rows, x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes):  # type: ignore[no-untyped-def]
    """Run the tile for this number of rows, 1 to ROWS."""
    if rows == 8:
        _tile8(x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes)
    elif rows == 7:
        _tile7(x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes)
    elif rows == 6:
        _tile6(x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes)
    elif rows == 5:
        _tile5(x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes)
    elif rows == 4:
        _tile4(x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes)
    elif rows == 3:
        _tile3(x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes)
    elif rows == 2:
        _tile2(x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes)
    else:
        _tile1(x, x_row, panel, panel_bytes, depth, bias, out, out_row, ahead, ahead_bytes)


@njit(error_model="numpy")
def panel_rows(panel_at, panel, block, x, bias, columns, out, ahead, ahead_size):  # type: ignore[no-untyped-def]
    """Multiply one panel, float32 [K, WIDTH], with one block of rows.

    What comes next, ``ahead_size`` bytes, is prefetched: by one tile, or half by each of two.
    """
    m, depth = x.shape
    x_row = depth * FLOAT_BYTES
    x_at, out_at = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    bias_at = np.int64(bias.ctypes.data) + panel * PANEL_ROW
    start, width, column = columns[panel, 0], columns[panel, 1], columns[panel, 2]
    valid = min(WIDTH, width - column)
    row = block * ROW_BLOCK
    end = min(m, row + ROW_BLOCK)
    tiles = (end - row + ROWS - 1) // ROWS
    spill = np.empty(ROWS * WIDTH if valid < WIDTH else 0, np.float32)
    half = ahead + ahead_size // 2
    ahead_bytes = ahead_size // depth // min(tiles, 2)
    while row < end:
        # Tiles of nearly equal height: 9 rows are 5 + 4, not 8 + 1.
        rows = (end - row + tiles - 1) // tiles
        tiles -= 1
        target = m * start + row * width + column
        at, stride = out_at + target * FLOAT_BYTES, width * FLOAT_BYTES
        if valid < WIDTH:
            at, stride = np.int64(spill.ctypes.data), PANEL_ROW
        _rows(
            rows, x_at + row * x_row, x_row, panel_at, 0, depth, bias_at,
            at, stride, ahead, ahead_bytes,
        )  # fmt: skip
        if valid < WIDTH:
            for i in range(rows):
                for j in range(valid):
                    out[target + i * width + j] = spill[i * WIDTH + j]
        ahead = half
        row += rows


@njit(error_model="numpy")
def _panels(first, block, x, panels, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply one panel, or for a single row of x QUAD panels, with one block of rows."""
    m, depth = x.shape
    panel_bytes, x_row = depth * PANEL_ROW, depth * FLOAT_BYTES
    x_at, out_at = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    panel_at = np.int64(panels.ctypes.data) + first * panel_bytes
    bias_at = np.int64(bias.ctypes.data) + first * PANEL_ROW
    start, width, column = columns[first, 0], columns[first, 1], columns[first, 2]
    if m == 1 and column + QUAD * WIDTH <= width:
        out_at += (start + column) * FLOAT_BYTES
        _quad(x_at, x_row, panel_at, panel_bytes, depth, bias_at, out_at, 0, 0, 0)
        return
    for panel in range(first, min(first + (QUAD if m == 1 else 1), panels.shape[0])):
        ahead = panel_at + panel_bytes
        panel_rows(panel_at, panel, block, x, bias, columns, out, ahead, panel_bytes)
        panel_at += panel_bytes


@pool.kernel(
    "void(float32[:, ::1], float32[:, :, ::1], float32[::1], int64[:, ::1], float32[::1])",
    error_model="numpy",
)
def product(x, panels, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply x [M, K] with all panels into ``out``, flat, matrix after matrix.

    ``columns[p]``: where panel p's matrix starts in a row of all of them, that matrix's
    width, and the panel's first column in it.
    """
    m = x.shape[0]
    step = QUAD if m == 1 else 1
    groups = (panels.shape[0] + step - 1) // step
    blocks = (m + ROW_BLOCK - 1) // ROW_BLOCK
    if panels.size * (m + WEIGHT_COST) < SERIAL_BELOW:
        for task in range(blocks * groups):
            _panels(task % groups * step, task // groups, x, panels, bias, columns, out)
    else:
        for task in prange(blocks * groups):
            _panels(task % groups * step, task // groups, x, panels, bias, columns, out)


@pool.kernel("void(float32[:, ::1], float32[:, :, ::1], int64)")
def pack(weight, panels, first):  # type: ignore[no-untyped-def]
    """Fill panels first, first + 1, ... with the rows of a weight matrix as columns."""
    width, depth = weight.shape
    for panel in prange((width + WIDTH - 1) // WIDTH):
        column = panel * WIDTH
        valid = min(WIDTH, width - column)
        for k in range(depth):
            for j in range(valid):
                panels[first + panel, k, j] = weight[column + j, k]
