"""The arrays of a matrix in a block format of GGUF, and their weights in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.precision.gguf_block_formats import (
    BLOCK_FORMATS,
    SCALE_DTYPES,
    WORD_BITS,
    BlockFormat,
)

SLAB_ROWS = 64  # rows that are dequantised at a time


@dataclass(frozen=True, slots=True)
class BlockArrays:
    """The arrays of a matrix [N, K] in a block format.

    Raises ``ValueError`` if an array is missing, or has another dtype or shape.
    """

    name: str  # a key of ``BLOCK_FORMATS``
    # uint32 [N, K * bits / 32]: the codes of each row, packed from the lowest bits on.
    words: NDArray[np.uint32]
    # The arrays that the format names. ``scales`` and ``mins`` are [N, K / group size],
    # ``super_scales`` and ``super_mins`` are float16, one per super-block.
    scales: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        rows, depth = self.shape
        layout = self.format
        per_group = np.dtype(SCALE_DTYPES[layout.scales]), (rows, depth // layout.group_size)
        per_block = np.dtype(np.float16), (rows, depth // layout.block_steps)
        wanted = {
            **dict.fromkeys(layout.group_arrays, per_group),
            **dict.fromkeys(layout.super_arrays, per_block),
        }
        given = {name: (array.dtype, array.shape) for name, array in self.scales.items()}
        if given != wanted or depth % layout.block_steps:
            raise ValueError(
                f"a {self.name} matrix {self.shape} must have the arrays {wanted} and a depth that "
                f"is a multiple of {layout.block_steps}; it has the arrays {given}"
            )

    @property
    def format(self) -> BlockFormat:
        """The matrix's format."""
        return BLOCK_FORMATS[self.name]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.words.shape[0], self.words.shape[1] * WORD_BITS // self.format.bits

    def dequantize(self) -> NDArray[np.float32]:
        """Return the matrix in float32 [N, K]."""
        wide = np.empty(self.shape, np.float32)
        scales, minimums = self.final_scales()
        for first in range(0, len(wide), SLAB_ROWS):  # which bounds the temporary memory
            slab = slice(first, first + SLAB_ROWS)
            groups = wide[slab].reshape(*scales[slab].shape, self.format.group_size)
            values = self._values(self.words[slab]).reshape(groups.shape)
            np.multiply(values, scales[slab, :, None], out=groups)
            if minimums is not None:
                groups -= minimums[slab, :, None]
        return wide

    def final_scales(self) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the scale of every group [N, groups] and, if the format has them, its minimum."""
        scales, minimums = self.scales["scales"], self.scales.get("mins")
        if self.format.scales == "powers":
            return np.ldexp(np.float32(1), scales.astype(np.int32) - 128), None
        if self.format.scales == "pairs":
            scales, minimums = scales & 0x0F, scales >> 4
        final = self._multiplied(scales, "super_scales")
        return final, None if minimums is None else self._multiplied(minimums, "super_mins")

    def _multiplied(self, parts: NDArray[Any], factors: str) -> NDArray[np.float32]:
        wide = parts.astype(np.float32)
        if self.format.super_groups:
            shared = self.scales[factors].astype(np.float32)
            wide *= np.repeat(shared, self.format.super_groups, axis=1)
        return wide

    def _values(self, words: NDArray[np.uint32]) -> NDArray[np.float32]:
        """Return the unscaled values of the codes in ``words``, as a flat array."""
        layout = self.format
        bits = np.unpackbits(words.ravel().view(np.uint8), bitorder="little")
        codes = bits.reshape(-1, layout.bits) @ (1 << np.arange(layout.bits, dtype=np.uint8))
        if layout.table:
            return np.array(layout.table, np.float32)[codes]
        return codes.astype(np.float32) - np.float32(layout.offset)
