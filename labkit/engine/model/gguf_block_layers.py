"""Layers of an MLX model with a matrix in a block format of GGUF (``gguf_block_formats``).

MLX cannot multiply by such a matrix. So these layers only store it. A forward on NumPy arrays reads
the blocks directly. For every other forward, ``mlx_layer`` converts the layer to an MLX layer with
the same weights. Q4_K and Q5_K have an exact counterpart in MLX's affine quantisation, with scales
in float32. The other formats are converted to float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from labkit.cpu.precision.gguf_block_arrays import BlockArrays
from labkit.cpu.precision.gguf_block_formats import (
    AFFINE_FORMATS,
    BLOCK_FORMATS,
    WORD_BITS,
    BlockFormat,
)

UNPACKING_GROUP = 32  # a group size of MLX that divides the depth of every block format
SCALE_DTYPES = {"int8": mx.int8, "uint8": mx.uint8, "pairs": mx.uint8, "float16": mx.float16}

Parts = Mapping[str, mx.array]


class BlockLayer(nn.Module):  # type: ignore[misc]
    """A layer like an MLX layer, its matrix in the GGUF format ``mode`` and zero until loaded."""

    def __init__(self, layer: Any, mode: str) -> None:
        super().__init__()
        layout, (rows, columns) = BLOCK_FORMATS[mode], layer.weight.shape
        self.mode, self.bits, self.group_size = mode, layout.bits, layout.group_size
        self.weight = mx.zeros((rows, columns * layout.bits // WORD_BITS), mx.uint32)
        if "bias" in layer:
            self.bias = layer.bias
        for name in layout.group_arrays:
            shape = (rows, columns // layout.group_size)
            self[name] = mx.zeros(shape, SCALE_DTYPES[layout.scales])
        for name in layout.super_arrays:
            self[name] = mx.zeros((rows, columns // layout.block_steps), mx.float16)

    @property
    def parts(self) -> Parts:
        """The matrix's arrays by name: the quantised codes (``weight``), and the scales."""
        return {name: self[name] for name in part_names(self.mode)}

    def arrays(self) -> BlockArrays:
        """Return the matrix as NumPy views of the layer's MLX arrays."""
        scales = {name: np.asarray(part) for name, part in self.parts.items()}
        return BlockArrays(self.mode, scales.pop("weight"), scales)

    def __call__(self, x: Any) -> Any:
        raise TypeError(f"MLX cannot multiply by a {self.mode} matrix: call mlx_layer() first")


class BlockLinear(BlockLayer):
    """A linear layer in a block format."""


class BlockEmbedding(BlockLayer):
    """An embedding in a block format."""


def block_layer(layer: Any, mode: str) -> BlockLayer:
    """Return a layer like ``layer`` in a block format. Its weights must be loaded afterwards.

    Raises ``ValueError`` if the layer is neither linear nor an embedding.
    """
    if type(layer) is nn.Linear:
        return BlockLinear(layer, mode)
    if type(layer) is nn.Embedding:
        return BlockEmbedding(layer, mode)
    raise ValueError(f"a {type(layer).__name__} cannot have weights in {mode}")


def part_names(mode: str) -> tuple[str, ...]:
    """Return the names of a block layer's arrays, the codes first."""
    layout = BLOCK_FORMATS[mode]
    return ("weight", *layout.group_arrays, *layout.super_arrays)


def dequantized(parts: Parts, mode: str) -> mx.array:
    """Return a matrix, or a stack of matrices, dequantized: a lazy float32 array [..., K]."""
    layout = BLOCK_FORMATS[mode]
    codes = _codes(parts["weight"], layout)
    if layout.table:
        values = mx.array(layout.table, mx.float32)[codes.astype(mx.uint32)]
    else:
        values = codes - layout.offset
    scales, minimums = _final_scales(parts, layout)
    groups = values.reshape(*scales.shape, layout.group_size) * scales[..., None]
    if minimums is not None:
        groups = groups - minimums[..., None]
    return groups.reshape(values.shape)


def _codes(words: mx.array, layout: BlockFormat) -> mx.array:
    """Unpack codes to float32 [..., K]: MLX's dequantisation with scale 1 and bias 0."""
    groups = words.shape[-1] * WORD_BITS // layout.bits // UNPACKING_GROUP
    ones = mx.ones((*words.shape[:-1], groups), mx.float32)
    return mx.dequantize(
        words, ones, mx.zeros_like(ones), group_size=UNPACKING_GROUP, bits=layout.bits
    )


def _final_scales(parts: Parts, layout: BlockFormat) -> tuple[mx.array, mx.array | None]:
    """Return each group's scale and each group's minimum (None: the format has no minimums)."""
    scales, minimums = parts["scales"], parts.get("mins")
    if layout.scales == "pairs":
        scales, minimums = scales & 0x0F, scales >> 4

    def multiplied(part: mx.array, factors: str) -> mx.array:
        wide = part.astype(mx.float32)
        if not layout.super_groups:
            return wide
        return wide * mx.repeat(parts[factors].astype(mx.float32), layout.super_groups, axis=-1)

    final = multiplied(scales, "super_scales")
    return final, None if minimums is None else multiplied(minimums, "super_mins")


def _mlx_weights(parts: Parts, mode: str) -> dict[str, mx.array]:
    """Return the matrix as the weights of an MLX layer: affine-quantised, or float32."""
    if mode not in AFFINE_FORMATS:
        return {"weight": dequantized(parts, mode)}
    scales, minimums = _final_scales(parts, BLOCK_FORMATS[mode])
    assert minimums is not None
    return {"weight": parts["weight"], "scales": scales, "biases": -minimums}


def mlx_quantization(mode: str) -> dict[str, Any] | None:
    """Return the quantisation of ``_mlx_weights`` as in config.json, or None for float32."""
    layout = BLOCK_FORMATS[mode]
    affine = mode in AFFINE_FORMATS
    return {"group_size": layout.group_size, "bits": layout.bits} if affine else None


def mlx_layer(layer: BlockLayer) -> Any:
    """Return an MLX layer with the weights of a block layer."""
    rows, depth = layer["weight"].shape[0], layer["weight"].shape[1] * WORD_BITS // layer.bits
    plain: Any
    if isinstance(layer, BlockEmbedding):
        plain = nn.Embedding(rows, depth)
    else:
        plain = nn.Linear(depth, rows, bias="bias" in layer)
        if "bias" in layer:
            plain.bias = layer["bias"]
    entry = mlx_quantization(layer.mode)
    if entry is not None:
        plain = plain.to_quantized(**entry)
    plain.update(_mlx_weights(layer.parts, layer.mode))
    return plain


def with_mlx_weights(weights: Parts, path: str, mode: str) -> dict[str, mx.array]:
    """Return a model's weights, with ``_mlx_weights`` applied to the layer at ``path``."""
    parts = {name: weights[f"{path}.{name}"] for name in part_names(mode)}
    others = {key: value for key, value in weights.items() if key not in _keys(path, parts)}
    own = _mlx_weights(parts, mode)
    return {**others, **dict(zip(_keys(path, own), own.values(), strict=True))}


def _keys(path: str, names: Iterable[str]) -> list[str]:
    return [f"{path}.{name}" for name in names]
