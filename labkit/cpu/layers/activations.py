"""SiLU, GELU, sigmoid and SwiGLU in float32, with a polynomial exponential function."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange, types
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.traced_array import TracedArray
from labkit.cpu.runtime import thread_pool
from labkit.cpu.runtime.numba_pipelines import INNER
from labkit.cpu.simd.simd_emitter import F32, LOG2E, Emitter, emitted

Array = NDArray[np.float32]

SILU, SWIGLU, GELU_TANH, GELU_ERF, SIGMOID = range(5)
CHUNK = 4096  # elements per task
# With fewer elements, handing work to other threads takes longer than the work itself.
MIN_PARALLEL_NUMBERS = 8192

LOG2_E = np.float32(LOG2E)
# ln 2 in two parts: the first has few bits, so that n * LN2_HIGH is exact.
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
# Adding 1.5 * 2**23 rounds a float32 to an integer, which is then in the low bits of the sum.
ROUND = np.float32(12582912.0)
_FASTMATH = {"contract", "nsz"}
SQRT_2_OVER_PI = np.float32(0.7978845608028654)


@emitted(types.float32, bits=types.int32)
def _bits_to_float(code: Emitter, bits: Any) -> Any:
    return code.builder.bitcast(bits, F32)


@njit(forceinline=True, fastmath=_FASTMATH, **INNER)
def _exp(x):  # type: ignore[no-untyped-def]
    """Return exp(x) with an error of at most 2 units in the last place. x is clamped to +-87.

    x is split into n ln 2 + r with |r| <= ln 2 / 2. exp(r) is a Taylor polynomial of degree 6, and
    n is added to the exponent bits.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    n = (x * LOG2_E + ROUND) - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * _bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(forceinline=True, fastmath=_FASTMATH, **INNER)
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return np.float32(1.0) / (np.float32(1.0) + _exp(-x))


@njit(fastmath=_FASTMATH, **INNER)
def activate(kind, x, gated, out):  # type: ignore[no-untyped-def]
    """Write the activation ``kind`` of each element of x to ``out``.

    SWIGLU also multiplies each result by the element of ``gated``. Other kinds ignore ``gated``.
    """
    if kind == SWIGLU:
        for i in range(x.size):
            out[i] = x[i] * _sigmoid(x[i]) * gated[i]
    elif kind == SILU:
        for i in range(x.size):
            out[i] = x[i] * _sigmoid(x[i])
    elif kind == SIGMOID:
        for i in range(x.size):
            out[i] = _sigmoid(x[i])
    elif kind == GELU_TANH:
        for i in range(x.size):
            # 0.5 (1 + tanh(u)) is sigmoid(2 u).
            cubic = x[i] + np.float32(0.044715) * x[i] * x[i] * x[i]
            out[i] = x[i] * _sigmoid(np.float32(2.0) * SQRT_2_OVER_PI * cubic)
    else:
        for i in range(x.size):
            value = np.float64(x[i])
            out[i] = np.float32(0.5 * value * (1.0 + math.erf(value * 0.7071067811865476)))


@thread_pool.kernel("void(int64, float32[::1], float32[::1], float32[::1])")
def _activate(kind, x, gated, out):  # type: ignore[no-untyped-def]
    if x.size < MIN_PARALLEL_NUMBERS:
        activate(kind, x, gated, out)
    else:
        for chunk in prange((x.size + CHUNK - 1) // CHUNK):
            start = chunk * CHUNK
            end = min(start + CHUNK, x.size)
            activate(kind, x[start:end], gated[start:end], out[start:end])


def _apply(kind: int, x: Array, gated: Array) -> Array:
    if isinstance(x, TracedArray):
        return _capture(kind, x, gated)
    flat = np.ascontiguousarray(x).reshape(-1)
    out = np.empty_like(flat)
    _activate(kind, flat, np.ascontiguousarray(gated).reshape(-1), out)
    return out.reshape(x.shape)


def _capture(kind: int, x: TracedArray, gated: Any) -> Any:
    """Add ``_apply`` as a node to the graph that is being captured."""
    out, size = x.capture.new_array(x.shape), x.num_elements
    x.capture.add_node(graph_ops.ACTIVATION, out, x=x, gate=gated, size=size, kind=kind)
    return out


def swiglu(gate: Array, x: Array) -> Array:
    """Return ``silu(gate) * x``. Both are float32 and must have the same shape."""
    if gate.shape != x.shape:
        raise ValueError(f"swiglu: gate has shape {gate.shape} and x {x.shape}; they must be equal")
    return _apply(SWIGLU, gate, x)


def silu(x: Array) -> Array:
    """Return ``x * sigmoid(x)``, float32."""
    return _apply(SILU, x, x)


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``, float32."""
    return _apply(SIGMOID, x, x)


def gelu_approx(x: Array) -> Array:
    """Return the tanh form of GELU, float32 (Hendrycks and Gimpel, 2016)."""
    return _apply(GELU_TANH, x, x)


def gelu(x: Array) -> Array:
    """Return ``x * Phi(x)`` with the exact error function, float32."""
    return _apply(GELU_ERF, x, x)
