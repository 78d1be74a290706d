"""Which kernel a batch goes to, on which grid, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from labkit.engine.attention.metadata import BQ, AttentionMetadata

# Decode units for each worker that make up for their unequal contexts.
UNITS_PER_WORKER = 4
# Bytes of a key's heads in one unit: read in order, and a tile of them fits the cache.
STREAM_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A kernel and its grid; ``heads`` KV heads are served by one unit."""

    kernel: Literal["decode", "tiled"]
    grid: tuple[int, int]
    heads: int
    reason: str


def choose(meta: AttentionMetadata, num_kv_heads: int, head_dim: int, workers: int) -> Dispatch:
    """Choose for a batch of ``num_kv_heads`` KV heads on so many workers.

    A decode unit serves several KV heads where there are tokens enough to keep the
    workers busy: a key's heads lie side by side, and memory is faster in order.
    """
    if meta.has_prefill:
        grid = (num_kv_heads, meta.total_q // BQ + meta.num_seqs)
        return Dispatch("tiled", grid, 1, "more query tokens than sequences")
    heads = 1
    if meta.total_q >= UNITS_PER_WORKER * workers:
        fitting = min(num_kv_heads, max(1, STREAM_BYTES // (4 * head_dim)))
        heads = max(n for n in range(1, fitting + 1) if num_kv_heads % n == 0)
    grid = (num_kv_heads // heads, meta.total_q)
    return Dispatch("decode", grid, heads, "no more query tokens than sequences")
