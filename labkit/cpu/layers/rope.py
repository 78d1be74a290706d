"""Rotary position embedding (RoPE) in float32, with a position for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange, types
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.traced_array import NotCapturable, TracedArray, TracedPositions
from labkit.cpu.runtime import thread_pool
from labkit.cpu.runtime.address_intrinsics import address_of
from labkit.cpu.runtime.jit import num_threads
from labkit.cpu.runtime.numba_pipelines import INNER
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import F32, F32_VECTOR, FLOAT_BYTES, I64, Emitter, emitted

Array = NDArray[np.float32]
Ints = NDArray[np.int32]

# With fewer elements, handing work to other threads takes longer than the work itself.
MIN_PARALLEL_NUMBERS = 16384
PARTS_PER_THREAD = 4  # of the work, as in ``thread_pool.PoolTuning.grain``


def _rotate(code: Emitter, size: int, operands: tuple[Any, ...], traditional: bool) -> None:
    """Emit the rotation of ``size`` pairs: a vector of them if it is ``LANES``, else one.

    ``operands`` are the addresses of the first element of each pair and of the second in x, of the
    same two in the output, and of the cosines and sines; and the scale. Traditional pairs are
    adjacent, so that the second address is not used.
    """
    build, kind = code.builder, F32_VECTOR if size == LANES else F32
    first, second, out_first, out_second, cos, sin, scale = operands
    if traditional:
        step = FLOAT_BYTES * size
        low, high = code.load(first, kind=kind), code.load(first, step, kind)
        a, b = low, high
        if size == LANES:
            a, b = (code.shuffle(low, high, range(i, 2 * LANES, 2)) for i in range(2))
    else:
        a, b = code.load(first, kind=kind), code.load(second, kind=kind)
    factor = code.splat(scale) if size == LANES else scale
    a, b = build.fmul(a, factor), build.fmul(b, factor)
    c, s = code.load(cos, kind=kind), code.load(sin, kind=kind)
    rotated = (
        build.fsub(build.fmul(a, c), build.fmul(b, s)),
        build.fadd(build.fmul(a, s), build.fmul(b, c)),
    )
    if not traditional:
        code.store(rotated[0], out_first)
        code.store(rotated[1], out_second)
        return
    if size == LANES:
        pairs = [lane for i in range(LANES) for lane in (i, LANES + i)]
        rotated = (code.shuffle(*rotated, pairs[:LANES]), code.shuffle(*rotated, pairs[LANES:]))
    code.store(rotated[0], out_first)
    code.store(rotated[1], out_first, step)


@emitted(scale=types.float32)
def rotate_row(code, x, out, cos, sin, half, width, scale, traditional):  # type: ignore[no-untyped-def]
    """Rotate ``half`` pairs of the elements of a row [width], and copy the other elements.

    ``x`` and ``out`` are the addresses of the row and of the result, ``cos`` and ``sin`` those of
    the row's position in the tables. The rotated elements are multiplied by ``scale``.
    """
    build = code.builder
    far = build.mul(half, I64(FLOAT_BYTES))
    vectors = build.udiv(half, I64(LANES))

    def rotate(size: int, adjacent: int) -> Callable[[Any], None]:
        def emit_pairs(index: Any) -> None:
            offset = build.mul(index, I64(FLOAT_BYTES * size))
            start = build.mul(offset, I64(2)) if adjacent else offset
            first, out_first = build.add(x, start), build.add(out, start)
            second, out_second = build.add(first, far), build.add(out_first, far)
            tables = build.add(cos, offset), build.add(sin, offset)
            places = first, second, out_first, out_second
            _rotate(code, size, (*places, *tables, scale), adjacent == 1)

        return emit_pairs

    def emit_case(adjacent: int) -> None:
        code.for_each(vectors, rotate(LANES, adjacent))
        rest = build.mul(vectors, I64(LANES))
        code.for_each(half, rotate(1, adjacent), rest)

    code.switch(traditional, range(2), emit_case)

    def copy(index: Any) -> None:
        offset = build.mul(index, I64(FLOAT_BYTES))
        code.store(code.load(build.add(x, offset), kind=F32), build.add(out, offset))

    code.for_each(width, copy, build.mul(half, I64(2)))


@njit(**INNER)
def _rotate_heads(x, offsets, heads, length, cos, sin, scale, traditional, first, end, out):  # type: ignore[no-untyped-def]
    """Rotate the rows of the heads from ``first`` to ``end``."""
    half, width = cos.shape[1], x.shape[1]
    x_at, out_at = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    cos_at, sin_at = np.int64(cos.ctypes.data), np.int64(sin.ctypes.data)
    batch, head = first // heads, first % heads
    for index in range(first, end):
        at = FLOAT_BYTES * half * offsets[batch]
        for row in range(index * length, (index + 1) * length):
            place = FLOAT_BYTES * width * row
            rotate_row(
                x_at + place, out_at + place, cos_at + at, sin_at + at, half, width, scale,
                traditional,
            )  # fmt: skip
            at += FLOAT_BYTES * half
        head += 1
        if head == heads:
            batch, head = batch + 1, 0


@thread_pool.kernel(
    "int64(float32[:, ::1], int32[::1], int64, int64, float32[:, ::1], float32[:, ::1], float32,"
    " int64, float32[:, ::1])"
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
    count = offsets.size * heads
    if x.size < MIN_PARALLEL_NUMBERS:
        _rotate_heads(x, offsets, heads, length, cos, sin, scale, traditional, 0, count, out)
    else:
        parts = min(count, PARTS_PER_THREAD * num_threads())
        for part in prange(parts):
            first, end = count * part // parts, count * (part + 1) // parts
            _rotate_heads(x, offsets, heads, length, cos, sin, scale, traditional, first, end, out)
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

        ``x``: float32 [B, heads, L, head_dim]. ``offsets``: position of the first of the L tokens,
        int32 [B], or one number for all. ``traditional``: dimensions 2i and 2i + 1 are a pair, else
        i and i + dims / 2. ``input_scale``: factor by which the rotated dimensions are multiplied
        (YaRN, LongRoPE). Raises ``ValueError`` if a position is negative, the number of offsets is
        not B, or the heads have too few dimensions.
        """
        batch, heads, length, width = x.shape
        if width < 2 * self._inverse.size:
            raise ValueError(
                f"heads have {width} dimensions, fewer than the {2 * self._inverse.size} to rotate"
            )
        if isinstance(x, TracedArray):
            return self._capture(x, offsets, traditional, input_scale)
        starts = np.asarray(offsets, np.int32)
        if starts.ndim == 0:
            starts = np.full(batch, starts, np.int32)
        if starts.shape != (batch,):
            raise ValueError(
                f"offsets have shape {starts.shape}; it must be ({batch},), one per batch row"
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
