"""The matrix product of ``int8_matmul`` in NumPy, and a check that the kernels give the same bits.

A kernel that lost a carry, a sign or a group's scale would still return plausible numbers. So each
format that a model needs is checked once per process, on numbers that include the largest sums.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.matmul.int8_dot import MAX_ACTIVATION
from labkit.cpu.matmul.int8_matmul import MAX_SINGLE_ROWS
from labkit.cpu.matmul.int8_microkernels import ROUNDING, ROUNDING_BITS, TILE_ROWS
from labkit.cpu.matmul.packed_linear import PackedLinear
from labkit.cpu.matmul.quantized_matmul import MAX_FUSED_ROWS
from labkit.cpu.matmul.quantized_weights import SPAN_COLUMNS, QuantizedMatrix
from labkit.cpu.precision.gguf_block_formats import WORD_BITS
from labkit.cpu.precision.kv_dtypes import from_float32, to_float32

Floats = NDArray[np.float32]
_CHECKED_GROUPS = 3


class Int8MismatchError(ArithmeticError):
    """The kernel's product differs from the reference."""


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """Return ``a * b + c``, rounded once, with NumPy's broadcasting.

    The product is exact in float64. The sum is rounded there to odd, so that rounding it again
    to float32 gives the result of a single rounding (S. Boldo and G. Melquiond, "Emulation of a FMA
    and correctly rounded sums", 2008).
    """
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = np.array(total).view(np.int64)
    inexact_even = np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    bits += np.where(inexact_even, np.where(away, 1, -1), 0)
    return bits.view(np.float64).astype(np.float32)


class QuantizedRows(NamedTuple):
    """Quantised rows: ``integers`` [M, groups, group size], ``scales``, ``sums`` [M, groups]."""

    integers: NDArray[np.int8]
    scales: Floats
    sums: Floats  # scale * sum(activation)


def quantize(x: Floats, group_size: int) -> QuantizedRows:
    """Quantise float32 [M, K] in NumPy: the reference, whose bits the kernels reproduce."""
    groups = x.reshape(len(x), -1, group_size)
    with np.errstate(all="ignore"):
        largest = np.abs(groups).max(axis=2)
        factor = np.float32(MAX_ACTIVATION) / largest
        factor[largest == 0] = 0
        shifted = groups * factor[:, :, None] + np.float32(ROUNDING)
        integers = shifted.view(np.int32) - np.int32(ROUNDING_BITS)
        scales = largest / np.float32(MAX_ACTIVATION)
        sums = scales * integers.sum(axis=2).astype(np.float32)
    return QuantizedRows(integers.astype(np.int8), scales, sums)


def unpack(matrix: QuantizedMatrix) -> NDArray[np.int64]:
    """Return the integers of a matrix, [N, K]."""
    places = np.arange(0, WORD_BITS, matrix.bits, dtype=np.uint32)
    integers = matrix.words[..., None] >> places & np.uint32((1 << matrix.bits) - 1)
    return integers.reshape(matrix.shape).astype(np.int64)


def multiply(x: Floats, matrix: QuantizedMatrix, bias: Floats) -> Floats:
    """Return x [M, K] @ matrix.T + bias [N] with the bits of ``int8_matmul``."""
    group = matrix.group_size
    rows, integers = quantize(x, group), unpack(matrix)
    scales, biases = to_float32(matrix.scales), to_float32(matrix.biases)
    out = np.broadcast_to(bias, (len(x), len(bias)))
    for g in range(x.shape[1] // group):
        weights = integers[:, g * group : (g + 1) * group]
        dots = rows.integers[:, g].astype(np.int64) @ weights.T
        factor = scales[None, :, g] * rows.scales[:, g, None]
        out = fma(dots.astype(np.float32), factor, out)
        out = fma(biases[None, :, g], rows.sums[:, g, None], out)
    return out


def random_matrix(element: str, bits: int, group_size: int) -> QuantizedMatrix:
    """Return random weights for the check, some of which are the largest integer of ``bits`` bits.

    The number of rows is not a multiple of ``SPAN_COLUMNS``, so the last span is not full. No scale
    or bias is tiny: the functions are those of trained models (``QuantizedMatrix.mantissa_exact``).
    """
    rng = np.random.default_rng(bits)
    shape = SPAN_COLUMNS + 5, _CHECKED_GROUPS * group_size
    words = rng.integers(0, 1 << 32, (shape[0], shape[1] * bits // WORD_BITS), np.uint32)
    words[::4] = 0xFFFFFFFF
    numbers = rng.standard_normal((2, shape[0], _CHECKED_GROUPS), np.float32)
    numbers = np.copysign(np.maximum(np.abs(numbers), np.float32(2**-6)), numbers)
    scales, biases = (from_float32(part, element) for part in numbers)
    return QuantizedMatrix(words, scales, biases, bits)


def random_rows(depth: int) -> Floats:
    """Return enough rows of activations [M, depth] for every path of the kernel.

    In some rows all activations are equal, so that their dot products with the largest weights are
    the largest possible.
    """
    rng = np.random.default_rng(depth)
    x = rng.standard_normal((MAX_FUSED_ROWS + TILE_ROWS + 1, depth), np.float32)
    x[0::5] = 1.0
    x[1::5] = -3.0
    x[2::5, : depth // 2] = 0.0
    return x


def find_mismatch(matrix: QuantizedMatrix) -> str | None:
    """Return where the kernel differs from the reference, as text, or None if it does not."""
    x = random_rows(matrix.shape[1])
    bias = np.linspace(-1, 1, matrix.shape[0], dtype=np.float32)
    expected = multiply(x, matrix, bias)
    packed = PackedLinear([matrix], [bias], activations="int8")
    for rows in (1, MAX_SINGLE_ROWS + 1, MAX_FUSED_ROWS, len(x)):
        (out,) = packed.multiply(x[:rows])
        differs = out != expected[:rows]
        if differs.any():
            row, column = np.argwhere(differs)[0]
            return (
                f"element [{row}, {column}] of {rows} rows is {out[row, column]}, not "
                f"{expected[row, column]}"
            )
    return None


@cache
def verify(element: str, bits: int, group_size: int) -> None:
    """Check that the kernels of a format compute the same bits as ``multiply``.

    Raises ``Int8MismatchError`` if the bits differ. The message names the first wrong element.
    """
    mismatch = find_mismatch(random_matrix(element, bits, group_size))
    if mismatch is not None:
        raise Int8MismatchError(
            f"engine.activations=int8: the product with {bits} bits in groups of {group_size} "
            f"differs from its reference: {mismatch}; set engine.activations=float32"
        )
