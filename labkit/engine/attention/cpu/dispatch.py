"""Which kernel a batch goes to, on which grid, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from labkit.engine.attention.metadata import AttentionMetadata
from labkit.engine.attention.options import FusedOptions
from labkit.engine.attention.resolvers.padded_grid import PaddedGrid
from labkit.engine.attention.resolvers.work_plan import WorkPlan
from labkit.metal.dispatch import BQ, partitions

# Decode units for each worker that make up for their unequal contexts.
UNITS_PER_WORKER = 4
# Bytes of a key's heads in one unit: read in order, and a tile of them fits the cache.
STREAM_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A kernel and its grid.

    Parameters
    ----------
    kernel, grid, reason
        As in ``LaunchReport``.
    heads
        KV heads that one unit serves.
    members
        Units among which the query heads of a KV head are divided; 1: they share loads.
    partitions
        Units among which the keys of a query are divided; above 1 ``reduce`` follows.
    """

    kernel: Literal["decode", "tiled"]
    grid: tuple[int, ...]
    heads: int
    reason: str
    members: int = 1
    partitions: int = 1


def choose(
    meta: AttentionMetadata,
    options: FusedOptions,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    workers: int,
) -> Dispatch:
    """Choose for a batch and a layer on so many workers.

    A decode unit serves several KV heads where there are tokens enough to keep the
    workers busy: a key's heads lie side by side, and memory is faster in order.
    """
    if meta.has_prefill and meta.max_query_len >= options.tile_threshold:
        grid = (num_kv_heads, *_places(meta, BQ))
        return Dispatch("tiled", grid, 1, "more query tokens than sequences")
    reason = "no more query tokens than sequences"
    if meta.has_prefill:
        reason = f"{meta.max_query_len} query tokens at most: below tile_threshold"
    heads = 1
    if meta.total_q >= UNITS_PER_WORKER * workers:
        fitting = min(num_kv_heads, max(1, STREAM_BYTES // (4 * head_dim)))
        heads = max(n for n in range(1, fitting + 1) if num_kv_heads % n == 0)
    members = 1 if options.gqa_sharing else num_q_heads // num_kv_heads
    columns = num_kv_heads // heads * members
    parts, why = partitions(
        options.split_kv,
        units=columns * meta.total_q,
        busy=UNITS_PER_WORKER * workers,
        max_seq_len=meta.max_seq_len,
        pure_decode=not meta.has_prefill,
    )
    grid = (columns, *_places(meta, 1), *([parts] if parts > 1 else []))
    return Dispatch("decode", grid, heads, reason + why, members, parts)


def _places(meta: AttentionMetadata, rows: int) -> tuple[int, ...]:
    """Return the grid of units of ``rows`` query tokens, without heads."""
    lookup = meta.lookup
    if isinstance(lookup, PaddedGrid):
        return (lookup.tokens if rows == 1 else lookup.qblocks, meta.num_seqs)
    if isinstance(lookup, WorkPlan):
        return (len(lookup.tokens if rows == 1 else lookup.qblocks),)
    return (meta.total_q if rows == 1 else meta.total_q // rows + meta.num_seqs,)
