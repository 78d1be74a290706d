"""Rotary position embedding (RoPE) in float32, with a position for each token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.traced_array import NotCapturable, TracedArray, TracedPositions
from labkit.cpu.runtime import thread_pool
from labkit.cpu.runtime.address_views import address_of
from labkit.cpu.runtime.linked_code import INNER

Array = NDArray[np.float32]
Ints = NDArray[np.int32]

# With fewer elements, handing work to other threads takes longer than the work itself.
MIN_PARALLEL_NUMBERS = 16384


@njit(forceinline=True, **INNER)
def rotate_row(x, row, cos, sin, at, scale, traditional, out):  # type: ignore[no-untyped-def]
    """Rotate one row of x to position ``at`` and write it to the same row of ``out``.

    The rotated elements are multiplied by ``scale``. The others are copied.
    """
    half = cos.shape[1]
    if traditional:
        for i in range(half):
            a, b = x[row, 2 * i] * scale, x[row, 2 * i + 1] * scale
            out[row, 2 * i] = a * cos[at, i] - b * sin[at, i]
            out[row, 2 * i + 1] = a * sin[at, i] + b * cos[at, i]
    else:
        for i in range(half):
            a, b = x[row, i] * scale, x[row, half + i] * scale
            out[row, i] = a * cos[at, i] - b * sin[at, i]
            out[row, half + i] = a * sin[at, i] + b * cos[at, i]
    for i in range(2 * half, x.shape[1]):
        out[row, i] = x[row, i]


@thread_pool.kernel(
    "int64(float32[:, ::1], int32[::1], int64, int64, float32[:, ::1], float32[:, ::1], float32,"
    " boolean, float32[:, ::1])",
    error_model="numpy",
)
def _rope(x, offsets, heads, length, cos, sin, scale, traditional, out):  # type: ignore[no-untyped-def]
    """Rotate rows [batch * heads * length, head_dim] and return 0.

    If a position is negative, rotate nothing and return -1. If the tables are too short, rotate
    nothing and return the number of positions that they need.
    """
    needed = np.int64(0)
    for b in range(offsets.size):
        if offsets[b] < 0:
            return -1
        needed = max(needed, offsets[b] + length)
    if needed > cos.shape[0]:
        return needed
    if x.size < MIN_PARALLEL_NUMBERS:
        for b in range(offsets.size):
            for h in range(heads):
                for t in range(length):
                    row = (b * heads + h) * length + t
                    rotate_row(x, row, cos, sin, offsets[b] + t, scale, traditional, out)
    else:
        for b in prange(offsets.size * heads):
            for t in range(length):
                at = offsets[b // heads] + t
                rotate_row(x, b * length + t, cos, sin, at, scale, traditional, out)
    return 0


class RotaryTable:
    """Tables of cosines and sines by position, which grow to the largest position used.

    ``inverse_frequencies``: float32 [dims / 2]: radians per position. ``position_scale``: factor by
    which positions are multiplied (linear scaling).
    """

    __slots__ = ("_cos", "_inverse", "_places", "_scale", "_sin")

    def __init__(self, inverse_frequencies: Array, position_scale: float) -> None:
        self._inverse = np.array(inverse_frequencies, np.float32)
        self._scale = np.float32(position_scale)
        self._grow(256)

    def hold(self, positions: int) -> tuple[int, int]:
        """Grow the tables to ``positions`` positions, and return the addresses of both tables.

        The cosines' address comes first.
        """
        if positions > len(self._cos):
            self._grow(positions)
        return self._places

    def _capture(self, x: TracedArray, offsets: Any, traditional: bool, input_scale: float) -> Any:
        """Add ``rotate`` as a node to the graph that is being captured."""
        _, heads, length, width = x.shape
        if not isinstance(offsets, TracedPositions) or length != 1:
            raise NotCapturable("the model rotates by positions that are not those of the tokens")
        if width < 2 * self._inverse.size:
            raise ValueError(
                f"heads have {width} dimensions, fewer than the {2 * self._inverse.size} to rotate"
            )
        out = x.capture.new_array(x.shape)
        node = x.capture.add_node(
            graph_ops.ROPE,
            out,
            x=x,
            heads=heads,
            width=width,
            positions=offsets,
            cos=0,  # every step sets the addresses, because they change when the table grows
            sin=0,
            half=self._inverse.size,
            input_scale=float(np.float32(input_scale)),
            traditional=traditional,
        )
        x.capture.rotary_tables.setdefault(self, []).append(node)
        return out

    def _grow(self, needed: int) -> None:
        size = 1 << (needed - 1).bit_length()
        positions = np.arange(size, dtype=np.float32) * self._scale
        # Angles are rounded to float32, as in mlx.core.fast.rope. At position 10,000, exact angles
        # would differ from MLX's by more than the rest of the model does.
        angles = positions[:, None] * self._inverse
        self._cos: Array = np.cos(angles)
        self._sin: Array = np.sin(angles)
        self._places = address_of(self._cos), address_of(self._sin)

    def rotate(
        self, x: Array, offsets: Ints | int, *, traditional: bool, input_scale: float = 1.0
    ) -> Array:
        """Rotate pairs of the first ``dims`` dimensions of every head by the token's position.

        Parameters
        ----------
        x
            float32 [B, heads, L, head_dim].
        offsets
            Position of the first of the L tokens: int32 [B], or one number for all.
        traditional
            True: dimensions 2i and 2i + 1 form a pair. False: i and i + dims / 2.
        input_scale
            Factor by which the rotated dimensions are multiplied (YaRN, LongRoPE).

        Raises
        ------
        ValueError
            A position is negative, the number of offsets is not B, or the heads have too few
            dimensions.
        """
        if isinstance(x, TracedArray):
            return self._capture(x, offsets, traditional, input_scale)
        batch, heads, length, width = x.shape
        starts = np.asarray(offsets, np.int32)
        if starts.ndim == 0:
            starts = np.full(batch, starts, np.int32)
        if starts.shape != (batch,):
            raise ValueError(
                f"offsets have shape {starts.shape}; it must be ({batch},), one per batch row"
            )
        if width < 2 * self._inverse.size:
            raise ValueError(
                f"heads have {width} dimensions, fewer than the {2 * self._inverse.size} to rotate"
            )
        rows = np.ascontiguousarray(x).reshape(-1, width)
        out = np.empty_like(rows)
        scale = np.float32(input_scale)
        while needed := _rope(
            rows, starts, heads, length, self._cos, self._sin, scale, traditional, out
        ):
            if needed < 0:
                raise ValueError("a token has a negative position")
            self._grow(needed)
        return out.reshape(x.shape)
