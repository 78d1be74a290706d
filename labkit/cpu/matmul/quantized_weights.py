"""Weight matrices in low precision: half-precision numbers, or packed integers in groups.

Every class here can write its matrix as spans, the memory layout of ``quantized_matmul`` (see
its docstring). Spans contain the model's bytes in another order: the elements of a vector register
belong to adjacent columns of the product (rows of the matrix) at the same step along the depth K.
``HalfMatrix`` describes what the other classes have, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.matmul.gemm import PANEL_COLUMNS
from labkit.cpu.precision.gguf_block_arrays import BlockArrays
from labkit.cpu.precision.gguf_block_formats import SCALE_DTYPES, WORD_BITS
from labkit.cpu.precision.kv_dtypes import NUMPY_DTYPES, dtype_name, to_float32

# With a single row of x, one panel has too few sums to hide the latency of an FMA. Two have enough.
SPAN_PANELS = 2
SPAN_COLUMNS = SPAN_PANELS * PANEL_COLUMNS
# MLX's quantisation: bits per integer, and integers per group (which shares a scale and a bias).
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


def is_affine_format(bits: int, group_size: int) -> bool:
    """Return whether MLX's affine quantisation has this number of bits and this group size."""
    return bits in QUANTIZED_BITS and group_size in GROUP_SIZES


@dataclass(frozen=True, slots=True)
class HalfMatrix:
    """A matrix [N, K] of float16, or of bfloat16 as uint16."""

    numbers: NDArray[Any]

    def __post_init__(self) -> None:
        halves = NUMPY_DTYPES["float16"], NUMPY_DTYPES["bfloat16"]
        if self.numbers.dtype not in halves:
            raise ValueError(
                f"a half-precision matrix must be float16, or bfloat16 as uint16, not "
                f"{self.numbers.dtype}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.numbers.shape[0], self.numbers.shape[1]

    @property
    def group_size(self) -> int:
        """Number of steps along the depth in a record."""
        return 1

    @property
    def kernel_format(self) -> tuple[str, int]:
        """The first two arguments of ``quantized_matmul.format_functions``."""
        return dtype_name(self.numbers), 0

    @property
    def mantissa_exact(self) -> bool:
        """Always False, because only integers are converted through the mantissa."""
        return False

    @property
    def weight_format(self) -> str:
        """The format in the name of the counter ``weights.<format>``."""
        return dtype_name(self.numbers)

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """The dtype of a record, which is one step along the depth."""
        return np.dtype([("numbers", self.numbers.dtype, (SPAN_COLUMNS,))])

    def write_records(self, records: NDArray[Any]) -> None:
        """Write the matrix into zeroed records [ceil(N / SPAN_COLUMNS), K]."""
        _write_columns(records["numbers"], self.numbers)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] in MLX's quantisation: ``integer * scale + bias``.

    Each group of adjacent integers of a row has its own scale and bias. Raises ``ValueError`` if
    MLX does not support this number of bits or this group size, or scales and biases differ in
    dtype or shape.
    """

    # uint32 [N, K * bits / 32]: the integers of each row, packed from the lowest bits on.
    words: NDArray[np.uint32]
    # scales, biases: [N, K / group size]: float32, float16, or bfloat16 as uint16.
    scales: NDArray[Any]
    biases: NDArray[Any]
    bits: int  # bits per integer

    def __post_init__(self) -> None:
        if not is_affine_format(self.bits, self.group_size):
            raise ValueError(
                f"{self.bits} bits in groups of {self.group_size}: must be one of "
                f"{', '.join(map(str, QUANTIZED_BITS))} bits in groups of one of "
                f"{', '.join(map(str, GROUP_SIZES))}, as in MLX"
            )
        if (self.scales.dtype, self.scales.shape) != (self.biases.dtype, self.biases.shape):
            raise ValueError(
                f"scales are {self.scales.dtype} {self.scales.shape} and biases "
                f"{self.biases.dtype} {self.biases.shape}; they must have the same dtype and shape"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * WORD_BITS // self.bits

    @property
    def group_size(self) -> int:
        """Number of integers that share a scale and a bias."""
        return int(self.shape[1] // max(1, self.scales.shape[1]))

    @property
    def kernel_format(self) -> tuple[str, int]:
        return dtype_name(self.scales), self.bits

    @property
    def mantissa_exact(self) -> bool:
        """Whether ``bias - 2**bits * scale`` is exact in float32 for every group.

        It is exact in trained models. The rounding error of a float32 addition is itself a float32,
        and is computed here (D. E. Knuth, *The Art of Computer Programming* 2, 4.2.2).
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
        return "quantised"

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """The dtype of a record, which is one quantisation group."""
        words = ("words", np.uint32, (self.group_size * self.bits // WORD_BITS, SPAN_COLUMNS))
        pair = [(name, self.scales.dtype, (SPAN_COLUMNS,)) for name in ("scales", "biases")]
        return np.dtype([*pair, words])

    def write_records(self, records: NDArray[Any]) -> None:
        _write_columns(records["words"], self.words.reshape(*self.scales.shape, -1))
        _write_columns(records["scales"], self.scales)
        _write_columns(records["biases"], self.biases)


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix [N, K] in one of the formats of GGUF (``gguf_block_formats``)."""

    arrays: BlockArrays

    @property
    def shape(self) -> tuple[int, int]:
        return self.arrays.shape

    @property
    def group_size(self) -> int:
        """Number of steps along the depth in a record: a super-block, or a group without them."""
        return self.arrays.format.block_steps

    @property
    def kernel_format(self) -> tuple[str, int]:
        return self.arrays.name, self.arrays.format.bits

    @property
    def mantissa_exact(self) -> bool:
        """Always False: codes are converted to float32 by an instruction."""
        return False

    @property
    def weight_format(self) -> str:
        return "quantised"

    @property
    def record_dtype(self) -> np.dtype[Any]:
        """The dtype of a record: the super-block's own scales, if any, then its runs."""
        layout = self.arrays.format
        per_run = layout.run_steps // layout.group_size
        fields: list[Any] = [
            (name, SCALE_DTYPES[layout.scales], (per_run, SPAN_COLUMNS))
            for name in layout.group_arrays
        ]
        words = (layout.run_steps * layout.bits // WORD_BITS, SPAN_COLUMNS)
        run = np.dtype([*fields, ("words", np.uint32, words)])
        supers: list[Any] = [(name, np.float16, (SPAN_COLUMNS,)) for name in layout.super_arrays]
        return np.dtype([*supers, ("runs", run, (layout.block_steps // layout.run_steps,))])

    def write_records(self, records: NDArray[Any]) -> None:
        layout, runs = self.arrays.format, records["runs"]
        lead = (self.shape[0], *runs.shape[1:])
        _write_columns(runs["words"], self.arrays.words.reshape(*lead, -1))
        for name in layout.group_arrays:
            _write_columns(runs[name], self.arrays.scales[name].reshape(*lead, -1))
        for name in layout.super_arrays:
            _write_columns(records[name], self.arrays.scales[name])


LowPrecisionMatrix = HalfMatrix | QuantizedMatrix | BlockMatrix


def _write_columns(target: NDArray[Any], rows: NDArray[Any]) -> None:
    """Write the rows of an array [N, ...] as columns of ``target`` [spans, ..., SPAN_COLUMNS]."""
    full, rest = divmod(len(rows), SPAN_COLUMNS)
    whole = rows[: full * SPAN_COLUMNS].reshape(full, SPAN_COLUMNS, *rows.shape[1:])
    target[:full] = np.moveaxis(whole, 1, -1)
    if rest:
        target[full, ..., :rest] = np.moveaxis(rows[full * SPAN_COLUMNS :], 0, -1)
