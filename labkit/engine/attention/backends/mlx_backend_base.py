"""The base class of backends on MLX arrays, whose pools MLX writes lazily in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.engine.attention import input_validation
from labkit.engine.attention.attention_metadata import AttentionMetadata
from labkit.engine.attention.attention_protocol import Arrays
from labkit.engine.attention.paged_backend_base import PagedBackend


@dataclass(slots=True)
class MlxPrepared:
    """Data that backends on MLX arrays derive from a step's metadata.

    ``by_kind`` has what each kind of layer needs, in a type of the backend's own.
    """

    slots: tuple[mx.array, mx.array] | None = None  # block and offset of each new token
    by_kind: dict[int, Any] = field(default_factory=dict)


class MlxBackend(PagedBackend):
    """A backend whose pools are MLX arrays. Nothing else may hold a reference to them.

    MLX writes to a pool in place as long as nothing else references or reads it. If a read is
    pending when a write is evaluated, MLX copies the whole pool. Therefore each layer has its own
    key pool and value pool, attention reads the pool that the write returned, and the next step is
    not launched before the present step has been evaluated.
    """

    arrays: Arrays = "mlx"
    device = "mlx"
    dtypes = ("float32", "float16", "bfloat16")

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        pool = mx.zeros(shape, getattr(mx, dtype))
        mx.eval(pool)
        return pool

    def adopt(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Use existing pools: MLX arrays themselves, and copies of NumPy arrays."""
        k_pools = [to_mlx(pool) for pool in keys]
        v_pools = [
            k_pool if v_pool is pool else to_mlx(v_pool)
            for pool, k_pool, v_pool in zip(keys, k_pools, values, strict=True)
        ]
        super().adopt(k_pools, v_pools)

    def _pool_dtypes(self, pool: Any) -> tuple[str, str | None]:
        return input_validation.dtype_name(pool), None

    def _convert_sinks(self, sinks: Any) -> Any:
        return None if sinks is None else to_mlx(sinks).astype(mx.float32)

    def new_prepared(self) -> MlxPrepared:
        return MlxPrepared()

    def write(self, layer: int, k: Any, v: Any, metadata: AttentionMetadata) -> None:
        prepared: MlxPrepared = metadata.prepared
        if prepared.slots is None:
            block, offset = np.divmod(metadata.slot_mapping, metadata.block_size)
            prepared.slots = mx.array(block.astype(np.int32)), mx.array(offset.astype(np.int32))
        self.keys[layer][prepared.slots] = k
        if v is not None:
            self.values[layer][prepared.slots] = v

    def pending(self, metadata: AttentionMetadata) -> list[Any]:
        """Return the pools, because their writes must be evaluated even if nothing reads them."""
        return [*self.keys, *self.values]


def to_mlx(array: Any) -> mx.array:
    """Return an MLX array unchanged, or an MLX copy of a NumPy array."""
    return array if isinstance(array, mx.array) else mx.array(np.ascontiguousarray(array))
