"""``gather``: copy a request's blocks into one contiguous array, then run MLX's attention.

This shows what a paged cache costs without a kernel that reads block tables: every layer copies all
keys and values that the requests of a step attend to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.backends import unpaged_sdpa
from labkit.engine.attention.backends.mlx_backend_base import MlxBackend, MlxPrepared
from labkit.engine.attention.launch_report import LaunchReport


class GatherBackend(MlxBackend):
    """Run MLX's attention on each request's gathered blocks."""

    name = "gather"

    def _check_supported(self, layer: AttentionLayer) -> None:
        unpaged_sdpa.check_softcap(layer.softcap, layer.sinks)

    def new_prepared(self) -> _GatherPrepared:
        return _GatherPrepared()

    def attend(
        self, layer: AttentionLayer, q: Any, metadata: AttentionMetadata, out: Any
    ) -> tuple[Any, LaunchReport]:
        prepared: _GatherPrepared = metadata.prepared
        if layer.kind not in prepared.requests:
            prepared.requests[layer.kind] = _requests(metadata, layer.window)
        requests = prepared.requests[layer.kind]
        pools = [self.keys[layer.index]]
        if not layer.latent:
            pools.append(self.values[layer.index])
        results = []
        for request in requests:
            gathered = [
                pool[request.blocks].reshape(1, -1, *pool.shape[2:])[:, request.keys]
                for pool in pools
            ]
            k, v = gathered[0], gathered[-1][..., : layer.value_dim]
            query, k, v = map(unpaged_sdpa.heads_first, (q[None, request.queries], k, v))
            result = unpaged_sdpa.attend(query, k, v, layer, request.mask)
            results.append(result[0].transpose(1, 0, 2).astype(q.dtype))
        keys = sum(request.keys.stop - request.keys.start for request in requests)
        empty = (0, layer.num_q_heads, layer.value_dim)
        return mx.concatenate(results) if results else mx.zeros(empty, q.dtype), LaunchReport(
            kernel="gather",
            grid=(len(requests),),
            reason="blocks are gathered for MLX's attention",
            resolver="none",
            layer=layer.index,
            kv_blocks_visited=sum(len(request.blocks) for request in requests),
            bytes=keys * layer.num_kv_heads * layer.token_bytes + 2 * q.nbytes,
            map_us=metadata.map_us,
        )


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of a step: its queries, its blocks, and which keys in these blocks it sees."""

    queries: slice
    blocks: mx.array
    keys: slice
    mask: mx.array | str | None


@dataclass(slots=True)
class _GatherPrepared(MlxPrepared):
    """The requests of a step, by kind of layer."""

    requests: dict[int, tuple[_Request, ...]] = field(default_factory=dict)


def _requests(metadata: AttentionMetadata, window: int | None) -> tuple[_Request, ...]:
    """Return the requests of a step that have queries."""
    requests, starts = [], metadata.cu_seqlens_q.tolist()
    for s, context in enumerate(metadata.seq_lens.tolist()):
        start, stop = starts[s : s + 2]
        if start == stop:
            continue
        length = stop - start
        first = 0 if window is None else max(0, context - length - window + 1)
        begin = first // metadata.block_size
        blocks = metadata.block_tables[s, begin : -(-context // metadata.block_size)]
        skipped = begin * metadata.block_size
        mask = unpaged_sdpa.causal_mask(length, context - first, window)
        keys = slice(first - skipped, context - skipped)
        requests.append(_Request(slice(start, stop), mx.array(blocks), keys, mask))
    return tuple(requests)
