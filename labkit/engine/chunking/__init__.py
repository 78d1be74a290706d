"""How much of one prompt a step may compute: a strategy per file."""

from __future__ import annotations

from labkit import config
from labkit.engine.chunking.base import Chunking
from labkit.engine.chunking.shrinking import Shrinking
from labkit.engine.chunking.static import Static

__all__ = ["Chunking", "create"]


def create(options: config.Scheduler) -> Chunking:
    """Return the chunking that the config names.

    Raises
    ------
    ValueError
        There is no chunk to shrink.
    """
    if options.chunk_policy is config.ChunkPolicy.static:
        return Static(options.chunk)
    if options.chunk is None:
        raise ValueError("chunk_policy=shrinking without a chunk")
    return Shrinking(options.chunk)
