"""Matrix products with packed weights: x[M, K] @ W[N, K].T + bias, float32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.engine.cpu.gemm import WIDTH, pack, product

Array = NDArray[np.float32]


class PackedWeights:
    """One or more weight matrices over the same input, packed for ``multiply``.

    Parameters
    ----------
    weights
        float32 [N_i, K] each; copied.
    biases
        float32 [N_i] or None, one per matrix.
    """

    __slots__ = ("_bias", "_columns", "_panels", "depth", "total", "widths")

    def __init__(self, weights: Sequence[Array], biases: Sequence[Array | None]) -> None:
        depths = {weight.shape[1] for weight in weights}
        if len(depths) != 1:
            raise ValueError(f"matrices of one product have one depth, not {sorted(depths)}")
        self.depth = depths.pop()
        self.widths = tuple(weight.shape[0] for weight in weights)
        self.total = sum(self.widths)
        counts = [-(-width // WIDTH) for width in self.widths]
        self._panels: Array = np.zeros((sum(counts), self.depth, WIDTH), np.float32)
        self._bias: Array = np.zeros(sum(counts) * WIDTH, np.float32)
        self._columns = np.zeros((sum(counts), 3), np.int64)
        panel = start = 0
        for weight, bias, width in zip(weights, biases, self.widths, strict=True):
            if bias is not None:
                self._bias[panel * WIDTH : panel * WIDTH + width] = bias
            pack(np.ascontiguousarray(weight), self._panels, panel)
            for column in range(0, width, WIDTH):
                self._columns[panel] = start, width, column
                panel += 1
            start += width

    def multiply(self, x: Array) -> list[Array]:
        """Return x @ W_i.T + b_i for each matrix: float32 [..., N_i], each contiguous.

        Parameters
        ----------
        x
            float32 [..., K].

        Raises
        ------
        ValueError
            The last axis is not K.
        """
        lead, depth = x.shape[:-1], x.shape[-1]
        if depth != self.depth:
            raise ValueError(f"input of shape {x.shape}: expected [..., {self.depth}]")
        if not x.flags.c_contiguous:
            x = np.ascontiguousarray(x)
        rows = x.size // depth
        out = np.empty(rows * self.total, np.float32)
        product(x.reshape(rows, depth), self._panels, self._bias, self._columns, out)
        if len(self.widths) == 1:
            return [out.reshape(*lead, self.total)]
        parts, start = [], 0
        for width in self.widths:
            end = start + rows * width
            parts.append(out[start:end].reshape(*lead, width))
            start = end
        return parts
