"""The kernel of the matrix product x[M, K] @ W[N, K].T + bias.

Weights are packed once into panels of a register tile's width, each [K, width].  A tile walks K
once and adds one outer product per step, so every output number is the chain
``fma(x[k], w[k], previous)`` over k = 0, 1, ... whatever the number of rows, the tile
that held it or the thread: a row's bits do not depend on its batch.  (The design is that
of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008,
without the packing of x: it is small here.)

While a tile works on one panel it asks memory for the next: at 8 to 32 rows the product
is as fast as the arithmetic although the weights come from memory.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from labkit.cpu import thread_pool
from labkit.cpu.microkernels import GEMM_ROWS, PANEL_ROW, ROW_PANELS, gemm_row, gemm_tile
from labkit.cpu.simd_emitter import FLOAT_BYTES

ROWS = GEMM_ROWS  # of a tile
PANEL_COLUMNS = PANEL_ROW // FLOAT_BYTES  # columns of a panel
# Rows that share one pass over the weights: their part of x stays in the second-level cache.
BLOCK_ROWS = 256
# A product smaller than this many multiplications costs less than a thread hand-off;
# reading a weight costs as much as some of them.
MIN_PARALLEL_FMAS = 1 << 19
WEIGHT_COST = 8


@njit(error_model="numpy")
def panel_rows(panel_at, panel, block, x, bias, columns, out, ahead, ahead_size):  # type: ignore[no-untyped-def]
    """Multiply one panel, float32 [K, WIDTH] at an address, with one block of rows.

    What comes next, ``ahead_size`` bytes, is prefetched: by one tile, or half by each of two.
    """
    m, depth = x.shape
    x_row = depth * FLOAT_BYTES
    x_at, out_at = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    bias_at = np.int64(bias.ctypes.data) + panel * PANEL_ROW
    start, width, column = columns[panel, 0], columns[panel, 1], columns[panel, 2]
    valid = min(PANEL_COLUMNS, width - column)
    row = block * BLOCK_ROWS
    end = min(m, row + BLOCK_ROWS)
    tiles = (end - row + ROWS - 1) // ROWS
    spill = np.empty(ROWS * PANEL_COLUMNS if valid < PANEL_COLUMNS else 0, np.float32)
    half = ahead + ahead_size // 2
    ahead_bytes = ahead_size // depth // min(tiles, 2)
    while row < end:
        # Tiles of nearly equal height: 9 rows are 5 + 4, not 8 + 1.
        rows = (end - row + tiles - 1) // tiles
        tiles -= 1
        target = m * start + row * width + column
        at, stride = out_at + target * FLOAT_BYTES, width * FLOAT_BYTES
        if valid < PANEL_COLUMNS:
            at, stride = np.int64(spill.ctypes.data), PANEL_ROW
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


@njit(error_model="numpy")
def multiply_panels(first, block, x, panels, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply one panel, or for a single row of x QUAD panels, with one block of rows."""
    m, depth = x.shape
    panel_bytes = depth * PANEL_ROW
    panel_at = np.int64(panels.ctypes.data) + first * panel_bytes
    start, width, column = columns[first, 0], columns[first, 1], columns[first, 2]
    if m == 1 and column + ROW_PANELS * PANEL_COLUMNS <= width:
        bias_at = np.int64(bias.ctypes.data) + first * PANEL_ROW
        out_at = np.int64(out.ctypes.data) + (start + column) * FLOAT_BYTES
        gemm_row(np.int64(x.ctypes.data), panel_at, panel_bytes, depth, bias_at, out_at)
        return
    for panel in range(first, min(first + (ROW_PANELS if m == 1 else 1), panels.shape[0])):
        ahead = panel_at + panel_bytes
        panel_rows(panel_at, panel, block, x, bias, columns, out, ahead, panel_bytes)
        panel_at += panel_bytes


@thread_pool.kernel(
    "void(float32[:, ::1], float32[:, :, ::1], float32[::1], int64[:, ::1], float32[::1])",
    error_model="numpy",
)
def product(x, panels, bias, columns, out):  # type: ignore[no-untyped-def]
    """Multiply x [M, K] with all panels into ``out``, flat, matrix after matrix.

    ``columns[p]``: where panel p's matrix starts in a row of all of them, that matrix's
    width, and the panel's first column in it.
    """
    m = x.shape[0]
    step = ROW_PANELS if m == 1 else 1
    groups = (panels.shape[0] + step - 1) // step
    blocks = (m + BLOCK_ROWS - 1) // BLOCK_ROWS
    if panels.size * (m + WEIGHT_COST) < MIN_PARALLEL_FMAS:
        for task in range(blocks * groups):
            multiply_panels(task % groups * step, task // groups, x, panels, bias, columns, out)
    else:
        for task in prange(blocks * groups):
            multiply_panels(task % groups * step, task // groups, x, panels, bias, columns, out)


@njit(error_model="numpy")
def take_packed_row(row, panels, out):  # type: ignore[no-untyped-def]
    """Write a row of the matrix to ``out`` [K]."""
    panel, column = row // PANEL_COLUMNS, row % PANEL_COLUMNS
    for k in range(out.size):
        out[k] = panels[panel, k, column]


@thread_pool.kernel("void(int64[::1], float32[:, :, ::1], float32[:, ::1])")
def take(rows, panels, out):  # type: ignore[no-untyped-def]
    """Write some rows of the matrix to ``out`` [len(rows), K]."""
    for i in prange(rows.shape[0]):
        take_packed_row(rows[i], panels, out[i])


@thread_pool.kernel("void(float32[:, ::1], float32[:, :, ::1], int64)")
def pack(weight, panels, first):  # type: ignore[no-untyped-def]
    """Fill panels first, first + 1, ... with the rows of a weight matrix as columns."""
    width, depth = weight.shape
    for panel in prange((width + PANEL_COLUMNS - 1) // PANEL_COLUMNS):
        column = panel * PANEL_COLUMNS
        valid = min(PANEL_COLUMNS, width - column)
        for k in range(depth):
            for j in range(valid):
                panels[first + panel, k, j] = weight[column + j, k]
