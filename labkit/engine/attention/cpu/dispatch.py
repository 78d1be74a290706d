"""Which kernel a batch goes to, on which grid, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from labkit.engine.attention.metadata import BQ, AttentionMetadata

# Decode units for each worker that make up for their unequal contexts.
UNITS_PER_WORKER = 4


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A kernel and its grid; ``heads`` KV heads are served by one unit."""

    kernel: Literal["decode", "tiled"]
    grid: tuple[int, int]
    heads: int
    reason: str


def choose(meta: AttentionMetadata, num_kv_heads: int, workers: int) -> Dispatch:
    """Choose for a batch of ``num_kv_heads`` KV heads on so many workers.

    A decode unit serves all KV heads where there are tokens enough to keep the workers
    busy: a block of keys is contiguous over its heads, and memory is faster in order.
    """
    if meta.has_prefill:
        grid = (num_kv_heads, meta.total_q // BQ + meta.num_seqs)
        return Dispatch("tiled", grid, 1, "more query tokens than sequences")
    reason = "no more query tokens than sequences"
    if meta.total_q >= UNITS_PER_WORKER * workers:
        return Dispatch("decode", (1, meta.total_q), num_kv_heads, f"{reason}; many tokens")
    return Dispatch("decode", (num_kv_heads, meta.total_q), 1, f"{reason}; few tokens")
