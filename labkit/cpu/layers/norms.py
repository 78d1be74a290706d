"""RMSNorm and LayerNorm of rows in float32.

The result of a row does not depend on the other rows. Unlike in all other kernels, it depends on
the CPU: the compiler orders the sum over a row by the width of the registers, so the last bits
differ between AVX2 and AVX-512.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.traced_array import Operand, TracedArray
from labkit.cpu.runtime import thread_pool
from labkit.cpu.runtime.address_intrinsics import address_of
from labkit.cpu.runtime.numba_pipelines import INNER

Array = NDArray[np.float32]

# With fewer elements, handing work to other threads takes longer than the work itself.
MIN_PARALLEL_NUMBERS = 16384


# Reassociation allows sums over a row in vector lanes. On a given CPU, their order depends only on
# the row's length.
@njit(fastmath={"reassoc", "contract", "nsz"}, **INNER)
def rms_row(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """Write the RMSNorm of a row to ``out``."""
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i] * x[i]
    scale = np.float32(1.0 / np.sqrt(np.float64(total) / x.size + eps))
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i]


@thread_pool.kernel("void(float32[:, ::1], float32[::1], float64, float32[:, ::1])")
def _rms_norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    if x.size < MIN_PARALLEL_NUMBERS:
        for row in range(x.shape[0]):
            rms_row(x[row], weight, eps, out[row])
    else:
        for row in prange(x.shape[0]):
            rms_row(x[row], weight, eps, out[row])


@thread_pool.kernel(
    "void(float32[:, ::1], float32[::1], float32[::1], float64, float32[:, ::1])",
    fastmath={"reassoc", "contract", "nsz"},
)
def _layer_norm(x, weight, bias, eps, out):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    for row in prange(x.shape[0]):
        total = np.float32(0.0)
        for i in range(width):
            total += x[row, i]
        mean = np.float32(total / width)
        squares = np.float32(0.0)
        for i in range(width):
            squares += (x[row, i] - mean) * (x[row, i] - mean)
        scale = np.float32(1.0 / np.sqrt(np.float64(squares) / width + eps))
        for i in range(width):
            out[row, i] = (x[row, i] - mean) * scale * weight[i] + bias[i]


def _rows(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return ``x / sqrt(mean(x**2) + eps) * weight`` over the last axis.

    ``x``: float32 [..., D]. ``weight``: float32 [D].
    """
    if isinstance(x, TracedArray):
        return _capture(x, weight, eps)
    rows = _rows(x)
    out = np.empty_like(rows)
    _rms_norm(rows, weight, eps, out)
    return out.reshape(x.shape)


def _capture(x: TracedArray, weight: Array, eps: float) -> Any:
    """Add ``rms_norm`` as a node to the graph that is being captured."""
    capture, width = x.capture, x.shape[-1]
    out = capture.new_array(x.shape)
    capture.keep(weight)
    capture.add_node(
        graph_ops.RMS_NORM,
        out,
        x=x,
        num_rows=Operand(0, x.row_size // width),
        width=width,
        weights=address_of(weight),
        eps=float(eps),
    )
    return out


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Return ``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis.

    ``x``: float32 [..., D]. ``weight``, ``bias``: float32 [D].
    """
    rows = _rows(x)
    out = np.empty_like(rows)
    _layer_norm(rows, weight, bias, eps, out)
    return out.reshape(x.shape)
