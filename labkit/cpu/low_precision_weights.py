"""Matrices of weights as they lie: half precision, or packed integers in groups.

A kernel reads a matrix in spans of ``SPAN_COLUMNS`` columns of the product (rows of the matrix), so
that a vector holds as many columns at one step along the depth. A span is a sequence of
records, read once and in order: a step of half precision, or a group's scales, biases and
words. Its bytes are the model's own, in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.gemm import PANEL_COLUMNS
from labkit.cpu.kv_dtypes import to_float32

# A single row of x has too few accumulators in one panel to hide the latency of an FMA.
SPAN_PANELS = 2
SPAN_COLUMNS = SPAN_PANELS * PANEL_COLUMNS
WORD_BITS = 32
# mlx's: bits of a quantised number, and numbers that share a scale and a bias.
QUANTIZED_BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)
# NumPy has no bfloat16: its words are the upper halves of a float32's.
TYPES = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    np.dtype(np.uint16): "bfloat16",
}


@dataclass(frozen=True, slots=True)
class HalfMatrix:
    """A matrix [N, K] of float16, or of bfloat16 as uint16."""

    numbers: NDArray[Any]

    def __post_init__(self) -> None:
        """Refuse what is no half precision."""
        if self.numbers.dtype not in TYPES or self.numbers.dtype == np.float32:
            raise ValueError(f"{self.numbers.dtype} is not float16 or bfloat16's words")

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix: N, K."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def group(self) -> int:
        """Steps along the depth of a record."""
        return 1

    @property
    def form(self) -> tuple[str, int]:
        """As ``stored_product.functions`` takes it."""
        return TYPES[self.numbers.dtype], 0

    @property
    def liftable(self) -> bool:
        """As ``QuantizedMatrix.liftable``: there is nothing to lift."""
        return False

    @property
    def weight_format(self) -> str:
        """Its type."""
        return self.form[0]

    @property
    def record(self) -> np.dtype[Any]:
        """One step along the depth."""
        return np.dtype([("numbers", self.numbers.dtype, (SPAN_COLUMNS,))])

    def fill(self, spans: NDArray[Any]) -> None:
        """Write the matrix into zeros of its records [N / SPAN rounded up, K]."""
        _lay(spans["numbers"], self.numbers)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantised matrix [N, K]: ``integer * scale + bias``, with a pair for each group.

    Parameters
    ----------
    words
        uint32 [N, K * bits / 32]: a row's integers one after another, lowest bits first.
    scales, biases
        [N, K / group]: float32, float16, or bfloat16 as uint16.
    bits
        Of an integer.
    """

    words: NDArray[np.uint32]
    scales: NDArray[Any]
    biases: NDArray[Any]
    bits: int

    def __post_init__(self) -> None:
        """Refuse what is not mlx's."""
        if self.bits not in QUANTIZED_BITS or self.group not in GROUP_SIZES:
            raise ValueError(f"{self.bits} bits in groups of {self.group}: not mlx's")
        if (self.scales.dtype, self.scales.shape) != (self.biases.dtype, self.biases.shape):
            raise ValueError("scales and biases are of one type and shape")

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix: N, K."""
        return self.words.shape[0], self.words.shape[1] * WORD_BITS // self.bits

    @property
    def group(self) -> int:
        """Numbers that share a scale and a bias."""
        return int(self.shape[1] // max(1, self.scales.shape[1]))

    @property
    def form(self) -> tuple[str, int]:
        """As ``stored_product.functions`` takes it."""
        return TYPES[self.scales.dtype], self.bits

    @property
    def liftable(self) -> bool:
        """Whether every bias minus ``2**bits`` scales is a float32, as of trained weights it is.

        Told by the error of the subtraction, which is exact itself (D. E. Knuth, *The Art of
        Computer Programming* 2, 4.2.2).
        """
        if self.scales.dtype == np.float32:  # of whose products MLX rounds each
            return False
        with np.errstate(all="ignore"):
            bias, scales = (
                to_float32(self.biases),
                to_float32(self.scales) * np.float32(-(1 << self.bits)),
            )
            total = bias + scales
            rest = total - bias
            error = (bias - (total - rest)) + (scales - rest)
        return not error.any()  # a NaN, of what overflows, counts

    @property
    def weight_format(self) -> str:
        """Its type, as counters have it."""
        return "quantised"

    @property
    def record(self) -> np.dtype[Any]:
        """One group."""
        words = ("words", np.uint32, (self.group * self.bits // WORD_BITS, SPAN_COLUMNS))
        pair = [(name, self.scales.dtype, (SPAN_COLUMNS,)) for name in ("scales", "biases")]
        return np.dtype([*pair, words])

    def fill(self, spans: NDArray[Any]) -> None:
        """Write the matrix into zeros of its records [N / SPAN rounded up, K / group]."""
        _lay(spans["words"], self.words.reshape(*self.scales.shape, -1))
        _lay(spans["scales"], self.scales)
        _lay(spans["biases"], self.biases)


LowPrecisionMatrix = HalfMatrix | QuantizedMatrix


def _lay(target: NDArray[Any], rows: NDArray[Any]) -> None:
    """Write rows [N, ...] side by side: target [spans, ..., SPAN]."""
    full, rest = divmod(len(rows), SPAN_COLUMNS)
    whole = rows[: full * SPAN_COLUMNS].reshape(full, SPAN_COLUMNS, *rows.shape[1:])
    target[:full] = np.moveaxis(whole, 1, -1)
    if rest:
        target[full, ..., :rest] = np.moveaxis(rows[full * SPAN_COLUMNS :], 0, -1)
