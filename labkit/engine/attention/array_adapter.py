"""Adapt an attention on MLX arrays to a model on NumPy arrays, and the reverse.

In every layer the arrays are converted, lazy arrays are evaluated, and the result is converted
back. The NumPy arrays are float32.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from labkit.engine.attention.attention_protocol import Arrays, Attention
from labkit.engine.attention.launch_report import Reports


class ArrayAdapter:
    """An ``Attention`` that converts arrays for an attention on the other kind of arrays.

    ``conversions`` is the number of calls of ``forward``. Each evaluates MLX's graph once.
    """

    is_lazy = False

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.arrays: Arrays = "numpy" if inner.arrays == "mlx" else "mlx"
        self.conversions = 0

    def bind(self, layer: int, *, sinks: Any = None, **options: Any) -> None:
        if isinstance(sinks, mx.array) and self._inner.arrays == "numpy":
            sinks = np.array(sinks.astype(mx.float32))
        self._inner.bind(layer, sinks=sinks, **options)

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        self.conversions += 1
        arrays = [array for array in (q, k, v) if array is not None]
        if self.arrays == "mlx":
            dtype, arrays = q.dtype, [array.astype(mx.float32) for array in arrays]
            mx.eval(arrays)
            q, k, v = [*map(np.asarray, arrays), None, None][:3]
            return mx.array(self._inner.forward(layer, q, k, v, metadata)).astype(dtype)
        q, k, v = [*map(mx.array, arrays), None, None][:3]
        result = self._inner.forward(layer, q, k, v, metadata)
        mx.eval(result, self._inner.pending(metadata))
        if out is None:
            return np.array(result)
        np.copyto(out, np.asarray(result))
        return out

    def report(self, metadata: Any) -> Reports:
        return self._inner.report(metadata)

    def pending(self, metadata: Any) -> list[Any]:
        return []
