"""How keys and values lie in memory: one file per layout."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from labkit.engine.kv_layout.kv_cache import KVLayout, LayerShape, LayoutKind

if TYPE_CHECKING:
    from labkit import config

__all__ = ["KVLayout", "LayerShape", "LayoutKind", "choose"]


def choose(options: config.Engine, computed: str = "float32") -> LayoutKind:
    """Return the layout, with its attention, that ``options`` name.

    ``computed``: the type that the model computes in, and caches unless ``engine.kv.dtype``
    says less.

    Raises
    ------
    ValueError
        The attention cannot be made; one line that says why.
    """
    from labkit.config import Admission
    from labkit.config import KVLayout as Word
    from labkit.engine import attention, dtype

    block_size, kept = options.kv.block_size, dtype.cached(options, computed)
    if options.kv.layout is Word.contiguous:
        from labkit.engine.kv_layout.contiguous import Contiguous

        return Contiguous(block_size, kept)
    if options.kv.layout is Word.padded:
        from labkit.engine.kv_layout.padded import Padded

        static = options.scheduler.admission is Admission.static
        return Padded(block_size, static=static, dtype=kept)
    from labkit.engine.kv_layout.paged import Paged

    make_backend = partial(attention.configured, options.attention)
    make_backend()  # refused now, if at all
    return Paged(
        make_backend,
        block_size,
        options.prefix_cache.value,
        _reuse_blocks(options),
        kept,
    )


def _reuse_blocks(options: config.Engine) -> int:
    """Return how many blocks a cached prefix is a multiple of."""
    chunk = options.scheduler.chunk
    if options.prefix_align.value == "block" or chunk is None:
        return 1
    return chunk // options.kv.block_size
