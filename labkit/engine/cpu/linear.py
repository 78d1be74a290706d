"""The matrix product of the CPU path: x[M, K] @ W[N, K].T + bias.

Weights are packed once into panels of a register tile's width.  A tile walks K once and
adds one outer product per step, so every output number is the chain
``fma(x[k], w[k], previous)`` over k = 0, 1, ... whatever the number of rows, the tile
that held it or the thread: a row's bits do not depend on its batch.  (The design is that
of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008,
without the packing of x: it is small here.)

The tile is LLVM IR of our own, since loop vectorisation would not promise that order.
It lives in this file because numba's cache only notices changes of the caller's file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from labkit.engine.cpu.registers import register_tile

Array = NDArray[np.float32]

TILE = register_tile()
LANES = TILE.lanes
ROWS = TILE.rows
WIDTH = TILE.columns
# A single row has too few accumulators to hide the latency of an FMA: four panels at once.
QUAD = 4
# Rows that share one pass over the weights: their part of x stays in the second-level cache.
ROW_BLOCK = 256
FLOAT_BYTES = 4


class _TileEmitter:
    """Emits the loop over K of a tile of ``rows`` x ``panels`` panels."""

    def __init__(self, builder: Any, rows: int, panels: int) -> None:
        self.b = builder
        self.rows = rows
        self.count = panels * TILE.vectors
        self.panels = panels
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

    def step(self, k: Any, rows: list[Any], panels: list[Any], sums: list[Any]) -> list[Any]:
        """Add the outer product of column k of x and row k of the panels."""
        at = self.b.mul(k, self.const(WIDTH * FLOAT_BYTES))
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
    """Return a tile: (x, x row bytes, panels, panel bytes, depth, bias, out, out row bytes).

    All arguments are addresses or counts (int64); ``out`` is written, the rest read.
    """

    @intrinsic
    def tile(_typing, x, x_row, panel, panel_bytes, depth, bias, out, out_row):  # type: ignore[no-untyped-def]
        signature = types.void(*[types.int64] * 8)

        def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            x, x_row, panel, panel_bytes, depth, bias, out, out_row = arguments
            e = _TileEmitter(builder, rows, panels)
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
def _rows(rows, x, x_row, panel, depth, bias, out, out_row):  # type: ignore[no-untyped-def]
    """Run the tile for this number of rows, 1 to ROWS."""
    if rows == 8:
        _tile8(x, x_row, panel, 0, depth, bias, out, out_row)
    elif rows == 7:
        _tile7(x, x_row, panel, 0, depth, bias, out, out_row)
    elif rows == 6:
        _tile6(x, x_row, panel, 0, depth, bias, out, out_row)
    elif rows == 5:
        _tile5(x, x_row, panel, 0, depth, bias, out, out_row)
    elif rows == 4:
        _tile4(x, x_row, panel, 0, depth, bias, out, out_row)
    elif rows == 3:
        _tile3(x, x_row, panel, 0, depth, bias, out, out_row)
    elif rows == 2:
        _tile2(x, x_row, panel, 0, depth, bias, out, out_row)
    else:
        _tile1(x, x_row, panel, 0, depth, bias, out, out_row)


@njit(
    "void(float32[:, ::1], float32[:, :, ::1], float32[::1], int64[:, ::1], float32[::1])",
    parallel=True,
    cache=True,
    error_model="numpy",
)
def _product(x, panels, bias, columns, out):  # type: ignore[no-untyped-def]
    m, depth = x.shape
    count = panels.shape[0]
    step = QUAD if m == 1 else 1
    groups = (count + step - 1) // step
    blocks = (m + ROW_BLOCK - 1) // ROW_BLOCK
    panel_bytes = depth * WIDTH * FLOAT_BYTES
    x_row = depth * FLOAT_BYTES
    for task in prange(blocks * groups):
        block = task // groups
        first = (task - block * groups) * step
        x_at = np.int64(x.ctypes.data)
        panel_at = np.int64(panels.ctypes.data) + first * panel_bytes
        bias_at = np.int64(bias.ctypes.data) + first * WIDTH * FLOAT_BYTES
        out_at = np.int64(out.ctypes.data)
        start, width, column = columns[first, 0], columns[first, 1], columns[first, 2]
        if step == QUAD and column + QUAD * WIDTH <= width:
            _quad(
                x_at, x_row, panel_at, panel_bytes, depth, bias_at,
                out_at + (start + column) * FLOAT_BYTES, 0,
            )  # fmt: skip
            continue
        for panel in range(first, min(first + step, count)):
            start, width, column = columns[panel, 0], columns[panel, 1], columns[panel, 2]
            valid = min(WIDTH, width - column)
            row = block * ROW_BLOCK
            end = min(m, row + ROW_BLOCK)
            tiles = (end - row + ROWS - 1) // ROWS
            spill = np.empty(ROWS * WIDTH if valid < WIDTH else 0, np.float32)
            while row < end:
                # Tiles of nearly equal height: 9 rows are 5 + 4, not 8 + 1.
                rows = (end - row + tiles - 1) // tiles
                tiles -= 1
                target = m * start + row * width + column
                at = out_at + target * FLOAT_BYTES
                stride = width * FLOAT_BYTES
                if valid < WIDTH:
                    at = np.int64(spill.ctypes.data)
                    stride = WIDTH * FLOAT_BYTES
                _rows(rows, x_at + row * x_row, x_row, panel_at, depth, bias_at, at, stride)
                if valid < WIDTH:
                    for i in range(rows):
                        for j in range(valid):
                            out[target + i * width + j] = spill[i * WIDTH + j]
                row += rows
            panel_at += panel_bytes
            bias_at += WIDTH * FLOAT_BYTES


@njit("void(float32[:, ::1], float32[:, :, ::1], int64)", parallel=True, cache=True)
def _pack(weight, panels, first):  # type: ignore[no-untyped-def]
    """Fill panels first, first + 1, ... with the rows of a weight matrix as columns."""
    width, depth = weight.shape
    for panel in prange((width + WIDTH - 1) // WIDTH):
        column = panel * WIDTH
        valid = min(WIDTH, width - column)
        for k in range(depth):
            for j in range(valid):
                panels[first + panel, k, j] = weight[column + j, k]


class PackedWeights:
    """One or more weight matrices over the same input, packed for ``multiply``.

    Parameters
    ----------
    weights
        float32 [N_i, K] each; copied.
    biases
        float32 [N_i] or None, one per matrix.
    """

    __slots__ = ("_bias", "_columns", "_panels", "depth", "total", "widths")

    def __init__(self, weights: Sequence[Array], biases: Sequence[Array | None]) -> None:
        depths = {weight.shape[1] for weight in weights}
        if len(depths) != 1:
            raise ValueError(f"matrices of one product have one depth, not {sorted(depths)}")
        self.depth = depths.pop()
        self.widths = tuple(weight.shape[0] for weight in weights)
        self.total = sum(self.widths)
        counts = [-(-width // WIDTH) for width in self.widths]
        self._panels: Array = np.zeros((sum(counts), self.depth, WIDTH), np.float32)
        self._bias: Array = np.zeros(sum(counts) * WIDTH, np.float32)
        self._columns = np.zeros((sum(counts), 3), np.int64)
        panel = start = 0
        for weight, bias, width in zip(weights, biases, self.widths, strict=True):
            if bias is not None:
                self._bias[panel * WIDTH : panel * WIDTH + width] = bias
            _pack(np.ascontiguousarray(weight), self._panels, panel)
            for column in range(0, width, WIDTH):
                self._columns[panel] = start, width, column
                panel += 1
            start += width

    def multiply(self, x: Array) -> list[Array]:
        """Return x @ W_i.T + b_i for each matrix: float32 [M, N_i], each contiguous.

        Parameters
        ----------
        x
            float32 [M, K], contiguous.
        """
        if x.ndim != 2 or x.shape[1] != self.depth:
            raise ValueError(f"input of shape {x.shape}: expected [rows, {self.depth}]")
        rows = len(x)
        out = np.empty(rows * self.total, np.float32)
        _product(x, self._panels, self._bias, self._columns, out)
        parts, start = [], 0
        for width in self.widths:
            parts.append(out[start : start + rows * width].reshape(rows, width))
            start += rows * width
        return parts
