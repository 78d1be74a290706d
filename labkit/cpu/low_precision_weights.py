"""Weight matrices in low precision: half-precision numbers, or packed integers in groups.

Both can write themselves into spans, the layout that ``low_precision_matmul`` reads and draws: the
model's own bytes in another order, so that a vector register holds as many columns of the product
(rows of the matrix) at one step along the depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.gemm import PANEL_COLUMNS
from labkit.cpu.kv_dtypes import NUMPY_DTYPES, dtype_name, to_float32

# One panel has too few sums for a single row of x to hide the latency of an FMA; two have enough.
SPAN_PANELS = 2
SPAN_COLUMNS = SPAN_PANELS * PANEL_COLUMNS
WORD_BITS = 32
# What MLX supports: bits of a quantised number, and numbers that share a scale and a bias.
QUANTIZED_BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class HalfMatrix:
    """A matrix [N, K] of float16, or of bfloat16 as uint16."""

    numbers: NDArray[Any]

    def __post_init__(self) -> None:
        """Check the type."""
        halves = NUMPY_DTYPES["float16"], NUMPY_DTYPES["bfloat16"]
        if self.numbers.dtype not in halves:
            raise ValueError(
                f"weights of {self.numbers.dtype}: a half-precision matrix is float16, or bfloat16 "
                f"as uint16"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def group_size(self) -> int:
        """Steps along the depth in a record."""
        return 1

    @property
    def kernel_format(self) -> tuple[str, int]:
        """The first two arguments of ``low_precision_matmul.format_functions``."""
        return dtype_name(self.numbers), 0

    @property
    def mantissa_exact(self) -> bool:
        """False: the mantissa conversion is for integers (``QuantizedMatrix``)."""
        return False

    @property
    def weight_format(self) -> str:
        """The name that counters use."""
        return dtype_name(self.numbers)

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """A record: one step along the depth."""
        return np.dtype([("numbers", self.numbers.dtype, (SPAN_COLUMNS,))])

    def write_records(self, records: NDArray[Any]) -> None:
        """Write the matrix into zeroed records [ceil(N / SPAN_COLUMNS), K]."""
        _write_columns(records["numbers"], self.numbers)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] quantised as MLX does: ``integer * scale + bias``, a pair for each group.

    Parameters
    ----------
    words
        uint32 [N, K * bits / 32]: the integers of a row one after another, lowest bits first.
    scales, biases
        [N, K / group size]: float32, float16, or bfloat16 as uint16.
    bits
        Bits of an integer.

    Raises
    ------
    ValueError
        MLX has no such bits or group size, or scales and biases differ in type or shape.
    """

    words: NDArray[np.uint32]
    scales: NDArray[Any]
    biases: NDArray[Any]
    bits: int

    def __post_init__(self) -> None:
        """Check that MLX has this format."""
        if self.bits not in QUANTIZED_BITS or self.group_size not in GROUP_SIZES:
            raise ValueError(
                f"{self.bits} bits in groups of {self.group_size}: not mlx's; allowed are bits of "
                f"{QUANTIZED_BITS} and groups of {GROUP_SIZES}"
            )
        if (self.scales.dtype, self.scales.shape) != (self.biases.dtype, self.biases.shape):
            raise ValueError(
                f"scales are {self.scales.dtype} {self.scales.shape}, biases {self.biases.dtype} "
                f"{self.biases.shape}: they must be of one type and shape"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.words.shape[0], self.words.shape[1] * WORD_BITS // self.bits

    @property
    def group_size(self) -> int:
        """Numbers that share a scale and a bias."""
        return int(self.shape[1] // max(1, self.scales.shape[1]))

    @property
    def kernel_format(self) -> tuple[str, int]:
        """The first two arguments of ``low_precision_matmul.format_functions``."""
        return dtype_name(self.scales), self.bits

    @property
    def mantissa_exact(self) -> bool:
        """Whether every bias minus ``2**bits`` scales is exact in float32; it is in trained models.

        The error of a float32 subtraction is itself a float32, and is computed here (D. E. Knuth,
        *The Art of Computer Programming* 2, 4.2.2).
        """
        if self.scales.dtype == np.float32:  # there MLX rounds the product of integer and scale
            return False
        with np.errstate(all="ignore"):
            bias = to_float32(self.biases)
            scales = to_float32(self.scales) * np.float32(-(1 << self.bits))
            total = bias + scales
            rest = total - bias
            error = (bias - (total - rest)) + (scales - rest)
        return not error.any()  # an overflow makes a NaN, which counts as an error

    @property
    def weight_format(self) -> str:
        """The name that counters use."""
        return "quantised"

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """A record: one group."""
        words = ("words", np.uint32, (self.group_size * self.bits // WORD_BITS, SPAN_COLUMNS))
        pair = [(name, self.scales.dtype, (SPAN_COLUMNS,)) for name in ("scales", "biases")]
        return np.dtype([*pair, words])

    def write_records(self, records: NDArray[Any]) -> None:
        """Write the matrix into zeroed records [ceil(N / SPAN_COLUMNS), K / group size]."""
        _write_columns(records["words"], self.words.reshape(*self.scales.shape, -1))
        _write_columns(records["scales"], self.scales)
        _write_columns(records["biases"], self.biases)


LowPrecisionMatrix = HalfMatrix | QuantizedMatrix


def _write_columns(target: NDArray[Any], rows: NDArray[Any]) -> None:
    """Write rows [N, ...] as columns of the target [spans, ..., SPAN_COLUMNS]."""
    full, rest = divmod(len(rows), SPAN_COLUMNS)
    whole = rows[: full * SPAN_COLUMNS].reshape(full, SPAN_COLUMNS, *rows.shape[1:])
    target[:full] = np.moveaxis(whole, 1, -1)
    if rest:
        target[full, ..., :rest] = np.moveaxis(rows[full * SPAN_COLUMNS :], 0, -1)
