"""What backends on MLX arrays share: pools that MLX owns, written lazily and in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.engine.attention import input_validation
from labkit.engine.attention.attention_metadata import AttentionMetadata
from labkit.engine.attention.attention_protocol import Arrays
from labkit.engine.attention.paged_backend import PagedBackend


class MlxBackend(PagedBackend):
    """Pools of MLX arrays whose sole owner is the backend.

    MLX scatters into a pool in place as long as nothing else holds or reads it: a reader
    that is pending when a write is evaluated makes it copy the whole pool. So each layer has
    a key pool and a value pool of its own, what attention reads is the pool that a write
    left, and the next step is not launched before this one has been evaluated.
    """

    arrays: Arrays = "mlx"
    device = "mlx"
    dtypes = ("float32", "float16", "bfloat16")

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        pool = mx.zeros(shape, getattr(mx, dtype))
        mx.eval(pool)
        return pool

    def adopt(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Take over pools that exist: MLX's as they are, NumPy's as copies."""
        super().adopt(*([to_mlx(pool) for pool in pools] for pools in (keys, values)))

    def _types(self, pool: Any) -> tuple[str, str | None]:
        return input_validation.dtype_name(pool), None

    def _sinks(self, sinks: Any) -> Any:
        return None if sinks is None else to_mlx(sinks).astype(mx.float32)

    def write(self, layer: int, k: Any, v: Any, metadata: AttentionMetadata) -> None:
        """Scatter new keys and values into a layer's pools."""
        if "slots" not in metadata.prepared:
            slots = np.divmod(metadata.slot_mapping, metadata.block_size)
            metadata.prepared["slots"] = tuple(mx.array(part.astype(np.int32)) for part in slots)
        slots = metadata.prepared["slots"]
        self.keys[layer][slots] = k
        self.values[layer][slots] = v

    def pending(self, metadata: AttentionMetadata) -> list[Any]:
        """Return the pools: what was written must not wait for a reader."""
        return [*self.keys, *self.values]


def to_mlx(array: Any) -> mx.array:
    """Return an MLX array as it is, a NumPy array as a copy."""
    return array if isinstance(array, mx.array) else mx.array(np.ascontiguousarray(array))
