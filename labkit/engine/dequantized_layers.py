"""MLX's layers with weights in float32: for good, or only while each is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

Multiply = Callable[[mx.array, mx.array], mx.array]

QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding)
# The layers whose weights a forward on NumPy arrays reads as they lie.
MATRICES = (nn.Linear, nn.Embedding, *QUANTISED)
OF_MATRICES = ("weight", "scales", "biases")


def matrix_parameter_names(model: Any) -> frozenset[str]:
    """Name the parameters that are matrices, or their scales and biases."""
    return frozenset(
        f"{path}.{name}"
        for path, layer in model.named_modules()
        if type(layer) in MATRICES
        for name in OF_MATRICES
    )


def weight_of(layer: Any) -> mx.array:
    """Return a layer's weight, float32 [out, in], not evaluated."""
    return _widened(layer, slice(None))


def _widened(layer: Any, rows: Any) -> mx.array:
    if not isinstance(layer, QUANTISED):
        weight: mx.array = layer.weight[rows].astype(mx.float32)
        return weight
    scales, biases = (layer[name][rows].astype(mx.float32) for name in ("scales", "biases"))
    return mx.dequantize(
        layer["weight"][rows], scales, biases, group_size=layer.group_size, bits=layer.bits
    )


def dequantize_matrices(model: Any) -> None:
    """Replace every quantised matrix by what its integers stand for."""
    _replace(model, lambda layer: _plain(layer) if isinstance(layer, QUANTISED) else layer)


def _plain(layer: Any) -> Any:
    rows, columns = weight_of(layer).shape
    plain: Any
    if isinstance(layer, nn.QuantizedEmbedding):
        plain = nn.Embedding(rows, columns)
    else:
        plain = nn.Linear(columns, rows, bias="bias" in layer)
        if "bias" in layer:
            plain.bias = layer.bias
    plain.weight = weight_of(layer)
    return plain


def lazily(x: mx.array, weight: mx.array) -> mx.array:
    """Return x [..., K] @ weight [N, K].T, not evaluated."""
    return x @ weight.T


def numpy_product(x: mx.array, weight: mx.array) -> mx.array:
    """Return the product as NumPy's own BLAS computes it, at once.

    The BLAS that MLX was built with may take twenty times as long.
    """
    return mx.array(np.asarray(x.astype(mx.float32)) @ np.asarray(weight).T)


@contextmanager
def dequantized_on_use(model: Any, multiply: Multiply = lazily) -> Iterator[None]:
    """Have a model compute in float32 while its matrices stay as they lie."""
    before = model.leaf_modules()
    _replace(model, lambda layer: _InUse(layer, multiply) if type(layer) in MATRICES else layer)
    try:
        yield
    finally:
        model.update_modules(before)


def _replace(model: Any, by: Callable[[Any], Any]) -> None:
    leaves = model.leaf_modules()
    model.update_modules(
        tree_map_with_path(lambda _, layer: by(layer), leaves, is_leaf=nn.Module.is_module)
    )


class _InUse(nn.Module):  # type: ignore[misc]
    """A layer whose weight is made anew each time."""

    def __init__(self, layer: Any, multiply: Multiply) -> None:
        super().__init__()
        self.layer = layer
        self._multiply = multiply

    @property
    def weight(self) -> mx.array:
        return weight_of(self.layer)

    @weight.deleter
    def weight(self) -> None:
        """Keep it: gemma3n assigns a weight's float32 to the weight, which this one is."""

    def __call__(self, x: mx.array) -> mx.array:
        if isinstance(self.layer, nn.Embedding | nn.QuantizedEmbedding):
            return _widened(self.layer, x)
        out = self.as_linear(x)
        return out + self.layer["bias"] if "bias" in self.layer else out

    def as_linear(self, x: mx.array) -> mx.array:
        return self._multiply(x, self.weight)
