"""How keys and values lie in memory: one file per layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.engine.kv_layout.base import KVLayout, LayerShape, LayoutKind

if TYPE_CHECKING:
    from labkit import config

__all__ = ["KVLayout", "LayerShape", "LayoutKind", "choose"]


def choose(options: config.Engine) -> LayoutKind:
    """Return the layout, with its attention, that ``options`` name.

    Raises
    ------
    ValueError
        The attention cannot be made; one line that says why.
    """
    from labkit.engine import attention
    from labkit.engine.kv_layout.paged import Paged

    backend = attention.configured(options.attention)
    return Paged(backend, options.kv.block_size, options.prefix_cache.value, _reuse_blocks(options))


def _reuse_blocks(options: config.Engine) -> int:
    """Return how many blocks a cached prefix is a multiple of."""
    chunk = options.scheduler.chunk
    if options.prefix_align.value == "block" or chunk is None:
        return 1
    return chunk // options.kv.block_size
