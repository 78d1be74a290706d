"""The device's copies of KV pools that the host keeps in NumPy.

A pool is copied when it is first attended to; from then on new keys and values are
scattered into the copy, so that a step moves its own tokens and never the pool. The copy
is the only owner of its memory when it is written, so that MLX scatters in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.base import Array


class DevicePools:
    """Copies by pool; one is dropped when its pool is."""

    def __init__(self) -> None:
        self._copies: dict[int, mx.array] = {}

    def copy_of(self, pool: Any) -> mx.array:
        """Return the device's copy of a NumPy pool, made now if there is none; MLX as it is."""
        if isinstance(pool, mx.array):
            return pool
        key = id(pool)
        if key not in self._copies:
            self._copies[key] = mx.array(pool)
            weakref.finalize(pool, self._copies.pop, key, None)
        return self._copies[key]

    def write(
        self,
        pools: Sequence[Array],
        new: Sequence[Array],
        slots: NDArray[np.int64],
        block_size: int,
    ) -> None:
        """Scatter ``new`` [tokens, num_kv_heads, head_dim] into the copies that there are.

        ``slots`` int64 [tokens], all of them inside the pools.
        """
        known = [(id(pool), values) for pool, values in zip(pools, new, strict=True)]
        known = [(key, values) for key, values in known if key in self._copies]
        if not known or not len(slots):
            return
        blocks, offsets = (mx.array(part) for part in np.divmod(slots, block_size))
        for key, values in known:
            self._copies[key][blocks, offsets] = mx.array(np.ascontiguousarray(values))
        mx.eval([self._copies[key] for key, _ in known])
