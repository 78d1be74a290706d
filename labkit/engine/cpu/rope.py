"""Rotary position embedding with a position per token, float32."""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ints = NDArray[np.int32]

SERIAL_BELOW = 16384


@njit(
    "void(float32[::1], float32[::1], float32[::1], int64, float32, boolean, float32[::1])",
    cache=True,
    error_model="numpy",
)
def _rotate(x, cos, sin, half, scale, traditional, out):  # type: ignore[no-untyped-def]
    if traditional:
        for i in range(half):
            a, b = x[2 * i] * scale, x[2 * i + 1] * scale
            out[2 * i] = a * cos[i] - b * sin[i]
            out[2 * i + 1] = a * sin[i] + b * cos[i]
    else:
        for i in range(half):
            a, b = x[i] * scale, x[half + i] * scale
            out[i] = a * cos[i] - b * sin[i]
            out[half + i] = a * sin[i] + b * cos[i]
    for i in range(2 * half, x.size):
        out[i] = x[i]


@njit(
    "int64(float32[:, :, :, ::1], int32[::1], float32[:, ::1], float32[:, ::1], float32,"
    " boolean, float32[:, :, :, ::1])",
    parallel=True,
    cache=True,
    error_model="numpy",
)
def _rope(x, offsets, cos, sin, scale, traditional, out):  # type: ignore[no-untyped-def]
    """Rotate, or return the number of positions that the tables must hold."""
    batch, heads, length, _ = x.shape
    needed = 0
    for b in range(batch):
        if offsets[b] < 0:
            return -1
        needed = max(needed, offsets[b] + length)
    if needed > cos.shape[0]:
        return needed
    half = cos.shape[1]
    if x.size < SERIAL_BELOW:
        for b in range(batch):
            for h in range(heads):
                for t in range(length):
                    at = offsets[b] + t
                    _rotate(x[b, h, t], cos[at], sin[at], half, scale, traditional, out[b, h, t])
    else:
        for row in prange(batch * heads):
            b, h = row // heads, row % heads
            for t in range(length):
                at = offsets[b] + t
                _rotate(x[b, h, t], cos[at], sin[at], half, scale, traditional, out[b, h, t])
    return 0


class RotaryTable:
    """Cosines and sines by position; grows to the largest position asked for.

    Parameters
    ----------
    inverse_frequencies
        float32 [dims / 2]: radians per position.
    position_scale
        What positions are multiplied with first (linear scaling).
    """

    __slots__ = ("_cos", "_inverse", "_scale", "_sin")

    def __init__(self, inverse_frequencies: Array, position_scale: float) -> None:
        self._inverse = np.array(inverse_frequencies, np.float32)
        self._scale = np.float32(position_scale)
        self._grow(256)

    def _grow(self, needed: int) -> None:
        size = 1 << (needed - 1).bit_length()
        positions = np.arange(size, dtype=np.float32) * self._scale
        # The angle is rounded to float32 as mlx.core.fast.rope does: at position 10,000
        # an exact angle would differ from it by more than the rest of the model does.
        angles = positions[:, None] * self._inverse
        self._cos: Array = np.cos(angles)
        self._sin: Array = np.sin(angles)

    def rotate(
        self, x: Array, offsets: Ints | int, *, traditional: bool, input_scale: float = 1.0
    ) -> Array:
        """Rotate pairs of the first dimensions of every head by its token's position.

        Parameters
        ----------
        x
            float32 [B, heads, L, head_dim].
        offsets
            Position of the first of the L tokens: int32 [B] or one number.
        traditional
            Pairs are neighbours (2i, 2i + 1) and not (i, i + dims / 2).
        input_scale
            What the rotated dimensions are multiplied with (YaRN, LongRoPE).

        Raises
        ------
        ValueError
            A negative position, or a number of offsets that is not B.
        """
        x = np.ascontiguousarray(x)
        if x.ndim == 3:
            return self.rotate(
                x[:, None], offsets, traditional=traditional, input_scale=input_scale
            )[:, 0]
        where = np.asarray(offsets, np.int32)
        if where.ndim == 0:
            where = np.full(len(x), where, np.int32)
        if where.shape != (len(x),):
            raise ValueError(f"{where.shape} offsets for a batch of {len(x)}")
        out = np.empty_like(x)
        while needed := _rope(
            x, where, self._cos, self._sin, np.float32(input_scale), traditional, out
        ):
            if needed < 0:
                raise ValueError("a token has a negative position")
            self._grow(needed)
        return out
