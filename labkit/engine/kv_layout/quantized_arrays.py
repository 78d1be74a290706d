"""Keys or values quantised by MLX, and MLX's attention over them.

As in mlx_lm's ``QuantizedKVCache``, ``mlx.core.quantize`` quantises groups of ``KV_GROUP`` elements
along the head dimension. Scales and biases are float32, so that they take as many bytes as in the
paged layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.cpu.precision.kv_dtypes import KV_GROUP, QUANTIZED_BITS
from labkit.engine.attention.backends import unpaged_sdpa
from labkit.engine.model.isolated_model_modules import import_plain


@dataclass(frozen=True, slots=True)
class QuantizedArrays:
    """The quantised keys, or the quantised values, of a layer.

    ``words`` (uint32, packed elements) and ``scales`` and ``biases`` (float32) have the shape
    [rows, num_kv_heads, capacity, ...].
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        """The arrays, in the order of ``mlx.core.quantize``."""
        return self.words, self.scales, self.biases

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.nbytes for part in self.parts)

    def columns(self, first: int, end: int) -> QuantizedArrays:
        """Return the tokens from ``first`` to ``end`` (exclusive)."""
        words, scales, biases = (part[:, :, first:end] for part in self.parts)
        return QuantizedArrays(words, scales, biases, self.bits)

    def store(self, index: Any, values: Any) -> None:
        """Quantise ``values``, which are MLX or NumPy arrays, and write them in place."""
        lazy = isinstance(values, mx.array)
        numbers = (values if lazy else mx.array(values)).astype(mx.float32)
        for part, new in zip(self.parts, _quantize(numbers, self.bits), strict=True):
            unpaged_sdpa.store(part, index, new if lazy else np.asarray(new))


def _quantize(numbers: mx.array, bits: int) -> Any:
    return mx.quantize(numbers, group_size=KV_GROUP, bits=bits)


def zeros(shape: tuple[int, ...], dtype: str) -> QuantizedArrays:
    """Return zeros for keys or values [rows, num_kv_heads, capacity, head_dim] of type ``dtype``.

    Their scales are 0, so that tokens that are not written have the value 0.
    """
    bits, (*lead, head_dim) = QUANTIZED_BITS[dtype], shape
    groups = head_dim // KV_GROUP
    words = mx.zeros((*lead, head_dim * bits // 32), mx.uint32)
    scales, biases = (mx.zeros((*lead, groups), mx.float32) for _ in range(2))
    return QuantizedArrays(words, scales, biases, bits)


def attend(
    queries: mx.array, keys: QuantizedArrays, values: QuantizedArrays, scale: float, mask: Any
) -> mx.array:
    """Call mlx_lm's attention over quantised keys and values [rows, heads, tokens, ...]."""
    output: mx.array = import_plain("base").quantized_scaled_dot_product_attention(
        queries.astype(mx.float32),
        keys.parts,
        values.parts,
        scale=scale,
        mask=mask,
        group_size=KV_GROUP,
        bits=keys.bits,
    )
    return output
