"""How keys and values lie in memory: one file per layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.engine.kv_layout.kv_cache_manager import KVCache, KVCacheFactory
from labkit.engine.kv_layout.kv_shape import KVShape

if TYPE_CHECKING:
    from labkit import config

__all__ = ["KVCache", "KVCacheFactory", "KVShape", "choose"]

Shapes = tuple[KVShape, ...]


def choose(options: config.Engine, computed: str = "float32") -> KVCacheFactory:
    """Return the layout, with its attention, that ``options`` name.

    ``computed``: the type that the model computes in, and caches unless ``engine.kv.dtype``
    says less.

    Raises
    ------
    ValueError
        The attention cannot be made; one line that says why.
    """
    from labkit.config import Admission, KVLayout
    from labkit.engine import attention, compute_dtype

    kv, kept = options.kv, compute_dtype.kv_dtype(options, computed)
    if kv.layout is KVLayout.paged:
        attention.create_from_config(options.attention)  # refused now, if at all

    def create(shapes: Shapes, num_blocks: int) -> KVCache:
        if kv.layout is KVLayout.contiguous:
            from labkit.engine.kv_layout import contiguous

            capacity = num_blocks * kv.block_size
            return contiguous.create(shapes, capacity, kept, kv.set_aside or 0)
        if kv.layout is KVLayout.padded:
            from labkit.engine.kv_layout import padded

            static = options.scheduler.admission is Admission.static
            return padded.create(shapes, num_blocks * kv.block_size, kept, static=static)
        from labkit.engine.kv_layout import paged

        backend, prefixes = (
            attention.create_from_config(options.attention),
            options.prefix_cache.value,
        )
        return paged.create(backend, shapes, num_blocks, kv, kept, prefixes, _reuse_blocks(options))

    return KVCacheFactory(kv, create)


def _reuse_blocks(options: config.Engine) -> int:
    """Return how many blocks a cached prefix is a multiple of."""
    chunk = options.scheduler.chunk
    if options.prefix_align.value == "block" or chunk is None:
        return 1
    return chunk // options.kv.block_size
