"""How many KV blocks a sliding window leaves out: arithmetic over the batch alone."""

from __future__ import annotations

import numpy as np

from labkit.engine.attention.metadata import AttentionMetadata


def blocks(meta: AttentionMetadata, rows: int, window: int) -> tuple[int, int]:
    """Return the KV blocks that units walk for one head: all of them, and those that they need.

    Parameters
    ----------
    meta
        The step's batch.
    rows
        Query tokens of a unit: 1 (decode) or ``BQ`` (tiled).
    window
        Keys that a query sees.
    """
    lengths = np.diff(meta.cu_seqlens_q)
    units = -(-lengths // rows)
    sequence = np.repeat(np.arange(meta.num_seqs), units)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(units) - units, units)) * rows
    last = np.minimum(first + rows, lengths[sequence]) - 1
    past = (meta.seq_lens - lengths)[sequence]
    end = -(-(past + last + 1) // meta.block_size)
    begin = np.maximum(0, past + first + 1 - window) // meta.block_size
    return int(end.sum()), int((end - begin).sum())


def outside(
    meta: AttentionMetadata, rows: int, window: int | None, columns: int, visited: int
) -> tuple[int, int]:
    """Return the blocks outside the window that were skipped, and those that were masked.

    Parameters
    ----------
    columns
        Heads or groups of heads that each walked the batch.
    visited
        What the kernel counted over all of them.
    """
    if window is None:
        return 0, 0
    whole, needed = (count * columns for count in blocks(meta, rows, window))
    return whole - visited, visited - needed
