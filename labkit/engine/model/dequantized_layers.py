"""Dequantise MLX's layers to float32: permanently, or each time a layer is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from labkit.engine.model.gguf_block_layers import (
    BlockEmbedding,
    BlockLayer,
    BlockLinear,
    dequantized,
    mlx_layer,
)

Multiply = Callable[[mx.array, Any], mx.array]  # of x and a layer
SLAB_BYTES = 1 << 24

QUANTIZED_LAYERS = (nn.QuantizedLinear, nn.QuantizedEmbedding, BlockLinear, BlockEmbedding)
# The layers whose weights a forward on NumPy arrays reads in the stored dtype.
MATRIX_LAYERS = (nn.Linear, nn.Embedding, *QUANTIZED_LAYERS)
MATRIX_PARAMETERS = ("weight", "scales", "biases", "mins", "super_scales", "super_mins")


def matrix_parameter_names(model: Any) -> frozenset[str]:
    """Return the parameter names of all matrices and, for quantised ones, of their scales."""
    return frozenset(
        f"{path}.{name}"
        for path, layer in model.named_modules()
        if type(layer) in MATRIX_LAYERS
        for name in MATRIX_PARAMETERS
    )


def dequantized_weight(layer: Any) -> mx.array:
    """Return a layer's weight as a lazy float32 array [out, in]."""
    return _dequantized_rows(layer, slice(None))


def _dequantized_rows(layer: Any, rows: Any) -> mx.array:
    if not isinstance(layer, QUANTIZED_LAYERS):
        weight: mx.array = layer.weight[rows].astype(mx.float32)
        return weight
    if isinstance(layer, BlockLayer):
        return dequantized({name: part[rows] for name, part in layer.parts.items()}, layer.mode)
    affine = layer.mode == "affine"
    scales = layer["scales"][rows]
    return mx.dequantize(
        layer["weight"][rows],
        scales.astype(mx.float32) if affine else scales,
        layer["biases"][rows].astype(mx.float32) if affine else None,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
    )


def replace_block_layers(model: Any) -> None:
    """Replace every ``BlockLayer``, which MLX cannot run, by an MLX layer with the same weights."""
    _replace(model, lambda layer: mlx_layer(layer) if isinstance(layer, BlockLayer) else layer)


def dequantize_matrices(model: Any) -> None:
    """Replace every quantised layer by a float32 layer with its dequantised weights."""
    _replace(
        model, lambda layer: _float_layer(layer) if isinstance(layer, QUANTIZED_LAYERS) else layer
    )


def _float_layer(layer: Any) -> Any:
    rows, columns = dequantized_weight(layer).shape
    float_layer: Any
    if isinstance(layer, nn.QuantizedEmbedding | BlockEmbedding):
        float_layer = nn.Embedding(rows, columns)
    else:
        float_layer = nn.Linear(columns, rows, bias="bias" in layer)
        if "bias" in layer:
            float_layer.bias = layer.bias
    float_layer.weight = dequantized_weight(layer)
    return float_layer


def _mlx_product(x: mx.array, layer: Any) -> mx.array:
    """Return x [..., K] @ weight [N, K].T as a lazy array."""
    return x @ dequantized_weight(layer).T


def numpy_product(x: mx.array, layer: Any) -> mx.array:
    """Return x [..., K] @ weight [N, K].T, computed immediately by NumPy's BLAS.

    This may be twenty times as fast as the BLAS that MLX was built with. A weight is dequantised in
    slabs of ``SLAB_BYTES``: that of a vocabulary would be the largest array of a process.
    """
    rows = np.asarray(x.astype(mx.float32))
    count, depth = dequantized_weight(layer).shape
    out = np.empty((*rows.shape[:-1], count), np.float32)
    step = max(1, SLAB_BYTES // (4 * depth))
    for first in range(0, count, step):
        slab = _dequantized_rows(layer, slice(first, first + step))
        out[..., first : first + step] = rows @ np.asarray(slab).T
    return mx.array(out)


@contextmanager
def dequantized_on_use(model: Any, multiply: Multiply = _mlx_product) -> Iterator[None]:
    """Let a model compute in float32 inside the context, without changing its stored matrices."""
    original = model.leaf_modules()
    _replace(
        model,
        lambda layer: _DequantizedOnUse(layer, multiply) if type(layer) in MATRIX_LAYERS else layer,
    )
    try:
        yield
    finally:
        model.update_modules(original)


def _replace(model: Any, replacement: Callable[[Any], Any]) -> None:
    leaves = model.leaf_modules()
    model.update_modules(
        tree_map_with_path(lambda _, layer: replacement(layer), leaves, is_leaf=nn.Module.is_module)
    )


class _DequantizedOnUse(nn.Module):  # type: ignore[misc]
    """A layer that dequantises its weight at each call."""

    def __init__(self, layer: Any, multiply: Multiply) -> None:
        super().__init__()
        self.layer = layer
        self._multiply = multiply

    @property
    def weight(self) -> mx.array:
        return dequantized_weight(self.layer)

    @weight.deleter
    def weight(self) -> None:
        """Do nothing.

        gemma3n assigns the weight, cast to float32. MLX then deletes this property before it stores
        the new array, which has the same values.
        """

    def __call__(self, x: mx.array) -> mx.array:
        if isinstance(self.layer, nn.Embedding | nn.QuantizedEmbedding | BlockEmbedding):
            return _dequantized_rows(self.layer, x)
        out = self.as_linear(x)
        return out + self.layer["bias"] if "bias" in self.layer else out

    def as_linear(self, x: mx.array) -> mx.array:
        return self._multiply(x, self.layer)
