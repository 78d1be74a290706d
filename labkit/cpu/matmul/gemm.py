"""The matrix product x[M, K] @ W[N, K].T + bias in float32.

Weights are packed once into panels as wide as a register tile, each [K, PANEL_COLUMNS]. A tile adds
one outer product for each step along K. So every output element is the chain
``fma(x[k], w[k], previous)`` over k = 0, 1, ..., and the bits of a row do not depend on the other
rows of its batch. The design is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication" (2008), without the packing of x, which is small here.

While a tile computes one panel, it prefetches the next. With 8 to 32 rows, the product is limited
by arithmetic, although the weights come from memory.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from labkit.cpu.matmul.microkernels import (
    GEMM_ROWS,
    PANEL_ROW_BYTES,
    ROW_PANELS,
    gemm_row,
    gemm_tile,
)
from labkit.cpu.runtime import thread_pool
from labkit.cpu.runtime.numba_pipelines import INNER
from labkit.cpu.simd.simd_emitter import FLOAT_BYTES

PANEL_COLUMNS = PANEL_ROW_BYTES // FLOAT_BYTES
# Rows of x per pass over the weights. This number of rows stays in the second-level cache.
BLOCK_ROWS = 256
# Products with fewer multiply-adds take less time than handing work to other threads. Reading a
# weight counts as ``WEIGHT_COST`` of them.
MIN_PARALLEL_FMAS = 1 << 19
WEIGHT_COST = 8


@njit(**INNER)
def multiply_panel(panel_at, panel, block, x, bias, columns, out, ahead, ahead_size):  # type: ignore[no-untyped-def]
    """Multiply one block of rows by the panel at address ``panel_at``.

    The panel is float32 [K, PANEL_COLUMNS]. At the same time, ``ahead_size`` bytes from address
    ``ahead`` on are prefetched. If the block has several tiles, the first two prefetch half each.
    """
    m, depth = x.shape
    x_row = depth * FLOAT_BYTES
    x_at, out_at = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    bias_at = np.int64(bias.ctypes.data) + panel * PANEL_ROW_BYTES
    start, width, column = columns[panel, 0], columns[panel, 1], columns[panel, 2]
    valid = min(PANEL_COLUMNS, width - column)
    row = block * BLOCK_ROWS
    end = min(m, row + BLOCK_ROWS)
    tiles = (end - row + GEMM_ROWS - 1) // GEMM_ROWS
    spill = np.empty(GEMM_ROWS * PANEL_COLUMNS if valid < PANEL_COLUMNS else 0, np.float32)
    half = ahead + ahead_size // 2
    ahead_bytes = ahead_size // depth // min(tiles, 2)
    while row < end:
        # Tiles of nearly equal height: 9 rows are divided into 5 + 4, not 8 + 1.
        rows = (end - row + tiles - 1) // tiles
        tiles -= 1
        target = m * start + row * width + column
        at, stride = out_at + target * FLOAT_BYTES, width * FLOAT_BYTES
        if valid < PANEL_COLUMNS:
            at, stride = np.int64(spill.ctypes.data), PANEL_ROW_BYTES
        gemm_tile(
            rows, x_at + row * x_row, x_row, panel_at, depth, bias_at, at, stride,
            ahead, ahead_bytes,
        )  # fmt: skip
        if valid < PANEL_COLUMNS:
            for i in range(rows):
                for j in range(valid):
                    out[target + i * width + j] = spill[i * PANEL_COLUMNS + j]
        ahead = half
        row += rows


@njit(**INNER)
def multiply_panels(first, end, block, x, panels, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply one block of rows by the panels from ``first`` to ``end``.

    ``ROW_PANELS`` panels of one matrix are multiplied at once, if x has one row. ``out`` is flat:
    [M, N] of each matrix, one after another. ``columns[p]`` contains three numbers for panel p: the
    number of columns of all preceding matrices, the number of columns of the panel's own matrix,
    and the panel's first column in it.
    """
    m, depth = x.shape
    panel_bytes = depth * PANEL_ROW_BYTES
    panel_at = np.int64(panels.ctypes.data) + first * panel_bytes
    start, width, column = columns[first, 0], columns[first, 1], columns[first, 2]
    whole = column + ROW_PANELS * PANEL_COLUMNS <= width
    if m == 1 and whole and end - first == ROW_PANELS:
        bias_at = np.int64(bias.ctypes.data) + first * PANEL_ROW_BYTES
        out_at = np.int64(out.ctypes.data) + (start + column) * FLOAT_BYTES
        gemm_row(np.int64(x.ctypes.data), panel_at, panel_bytes, depth, bias_at, out_at)
        return
    for panel in range(first, end):
        ahead = panel_at + panel_bytes
        multiply_panel(panel_at, panel, block, x, bias, columns, out, ahead, panel_bytes)
        panel_at += panel_bytes


@njit(**INNER)
def take_packed_row(row, panels, out):  # type: ignore[no-untyped-def]
    """Copy a row of the packed matrix to ``out`` [K]."""
    panel, column = row // PANEL_COLUMNS, row % PANEL_COLUMNS
    for k in range(out.size):
        out[k] = panels[panel, k, column]


@thread_pool.kernel("void(float32[:, ::1], float32[:, :, ::1], int64)")
def pack_panels(weight, panels, first):  # type: ignore[no-untyped-def]
    """Pack a weight matrix [N, K] into the panels from ``first`` on. Its rows become columns."""
    width, depth = weight.shape
    for panel in prange((width + PANEL_COLUMNS - 1) // PANEL_COLUMNS):
        column = panel * PANEL_COLUMNS
        valid = min(PANEL_COLUMNS, width - column)
        for k in range(depth):
            for j in range(valid):
                panels[first + panel, k, j] = weight[column + j, k]
