"""KV layouts: how keys and values are stored, one module per layout."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from labkit.engine.attention.kv_shape import KVShape, StateShape
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_cache_interface import KVCache, KVCacheFactory

if TYPE_CHECKING:
    from labkit import config

__all__ = ["KVCache", "KVCacheFactory", "KVShape", "create_factory"]

Shapes = tuple[KVShape, ...]


def create_factory(
    options: config.Engine,
    computed: str = "float32",
    states: tuple[StateShape, ...] = (),
    windows: tuple[int | None, ...] = (),
) -> KVCacheFactory:
    """Return the factory of KV caches for the layout and the attention of ``options``.

    ``computed`` is the dtype that the model computes in. Keys and values have the same dtype,
    unless ``engine.kv.dtype`` is narrower. ``states`` are the shapes of the model's states, which
    keep their own dtypes. ``windows`` has the sliding window of each layer with keys and values
    (None: the layer has no window), for ``engine.kv.window_pools``. Raises ``EngineError`` if the
    attention cannot be created. The message gives the reason.
    """
    from labkit.config import Admission, KVLayout
    from labkit.engine import attention, memory_budget
    from labkit.engine.model import compute_dtype

    kv, dtype = options.kv, compute_dtype.kv_dtype(options, computed)
    if kv.layout is KVLayout.paged:
        # It raises now rather than after the model is loaded.
        try:
            attention.create_from_config(options.attention)
        except ValueError as error:
            raise EngineError(str(error)) from error

    def create(shapes: Shapes, num_blocks: int) -> KVCache:
        if kv.layout is KVLayout.contiguous:
            from labkit.engine.kv_layout import contiguous

            return contiguous.create(shapes, num_blocks * kv.block_size, dtype, kv)
        if kv.layout is KVLayout.padded:
            from labkit.engine.kv_layout import padded

            static = options.scheduler.admission is Admission.static
            return padded.create(shapes, num_blocks * kv.block_size, dtype, static=static)
        from labkit.engine.kv_layout import paged

        backend = attention.create_from_config(options.attention)
        prefixes = options.prefix_cache.value, options.prefix_eviction
        return paged.create(
            backend, shapes, num_blocks, kv, dtype, *prefixes, _reuse_blocks(options)
        )

    def create_windowed(shapes: Shapes, num_blocks: int) -> KVCache:
        from labkit.engine.kv_layout import window_pools
        from labkit.engine.memory_budget.required_kv_slots import StepLimits

        backend = functools.partial(attention.create_from_config, options.attention)
        return window_pools.create(
            backend, shapes, windows, num_blocks, kv, dtype, StepLimits.of(options)
        )

    return KVCacheFactory(
        kv,
        create,
        states,
        options.scheduler.max_num_seqs,
        memory_budget.num_state_snapshots(options),
        create_windowed if kv.window_pools else None,
    )


def _reuse_blocks(options: config.Engine) -> int:
    """Return ``n`` such that the length of a reused prefix must be a multiple of ``n`` blocks."""
    chunk = options.scheduler.chunk
    if options.prefix_align.value == "block" or chunk is None:
        return 1
    return chunk // options.kv.block_size
