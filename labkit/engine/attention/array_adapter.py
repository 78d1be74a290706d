"""Attention for a model on the other kind of arrays: NumPy's for MLX's, and MLX's for NumPy's.

Every layer crosses there and back, and what is lazy is evaluated on the way. NumPy's are
float32.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from labkit.engine.attention.attention_protocol import Arrays, Attention
from labkit.engine.attention.launch_report import Reports


class ArrayAdapter:
    """An ``Attention`` that is another one's, taking the arrays that the other does not.

    ``crossings``: layers that crossed, each an evaluation.
    """

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.arrays: Arrays = "numpy" if inner.arrays == "mlx" else "mlx"
        self.crossings = 0

    def bind(self, layer: int, *, sinks: Any = None, **options: Any) -> None:
        """Bind the other's layer; see ``Attention.bind``."""
        if isinstance(sinks, mx.array) and self._inner.arrays == "numpy":
            sinks = np.array(sinks.astype(mx.float32))
        self._inner.bind(layer, sinks=sinks, **options)

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        """Take the arrays across, attend, and take the result back."""
        self.crossings += 1
        arrays = [q] if k is None else [q, k, v]
        if self.arrays == "mlx":
            kind, arrays = q.dtype, [array.astype(mx.float32) for array in arrays]
            mx.eval(arrays)
            q, k, v = [*map(np.asarray, arrays), None, None][:3]
            return mx.array(self._inner.forward(layer, q, k, v, metadata)).astype(kind)
        q, k, v = [*map(mx.array, arrays), None, None][:3]
        result = self._inner.forward(layer, q, k, v, metadata)
        mx.eval(result, self._inner.pending(metadata))
        if out is None:
            return np.array(result)
        np.copyto(out, np.asarray(result))
        return out

    def report(self, metadata: Any) -> Reports:
        """Return the other's report."""
        return self._inner.report(metadata)

    def pending(self, metadata: Any) -> list[Any]:
        """Return nothing: each layer was evaluated as it crossed."""
        return []


def adapt(arrays: Arrays, attention: Attention) -> Attention:
    """Return an attention that takes these arrays."""
    return attention if attention.arrays == arrays else ArrayAdapter(attention)
