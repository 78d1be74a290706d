"""``gather``: copy a request's blocks into one contiguous array, then MLX's attention.

What a paged cache costs without a kernel that reads block tables: every step copies all
the keys and values that it attends to, once per layer and request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from labkit.engine.attention import sdpa
from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.launch_report import LaunchReport
from labkit.engine.attention.mlx_backend import MlxBackend


class GatherBackend(MlxBackend):
    """Attention per request over gathered blocks: no softcap, no stamp."""

    name = "gather"

    def _refuse(self, layer: AttentionLayer) -> None:
        if layer.softcap is not None:
            raise ValueError(
                f"softcap={layer.softcap}: MLX's attention has none; use backend=fused"
            )

    def attend(
        self, layer: AttentionLayer, q: Any, metadata: AttentionMetadata, out: Any
    ) -> tuple[Any, LaunchReport]:
        """Gather and attend, request by request; see ``PagedBackend.attend``."""
        if layer.kind not in metadata.prepared:
            metadata.prepared[layer.kind] = _spans(metadata, layer.window)
        spans: tuple[_Span, ...] = metadata.prepared[layer.kind]
        pools = self.keys[layer.index], self.values[layer.index]
        results = []
        for span in spans:
            k, v = (
                pool[span.blocks].reshape(1, -1, *pool.shape[2:])[:, span.first : span.end]
                for pool in pools
            )
            one = mx.fast.scaled_dot_product_attention(
                q[None, span.start : span.stop].transpose(0, 2, 1, 3),
                k.transpose(0, 2, 1, 3),
                v.transpose(0, 2, 1, 3),
                scale=layer.scale,
                mask=span.mask,
                sinks=layer.sinks,
            )
            results.append(one[0].transpose(1, 0, 2).astype(q.dtype))
        keys = sum(span.end - span.first for span in spans)
        return mx.concatenate(results) if results else mx.zeros_like(q), LaunchReport(
            kernel="gather",
            grid=(len(spans),),
            reason="blocks are gathered for MLX's attention",
            resolver="none",
            layer=layer.index,
            kv_blocks_visited=sum(len(span.blocks) for span in spans),
            bytes=2 * keys * layer.num_kv_heads * layer.row_bytes + 2 * q.nbytes,
            map_us=metadata.map_us,
        )


@dataclass(frozen=True, slots=True)
class _Span:
    """One request: its queries, its blocks, and which of their tokens are its keys."""

    start: int
    stop: int
    blocks: mx.array
    first: int
    end: int
    mask: mx.array | str | None


def _spans(metadata: AttentionMetadata, window: int | None) -> tuple[_Span, ...]:
    """Return a span for every request that has queries."""
    spans, starts = [], metadata.cu_seqlens_q.tolist()
    for s, context in enumerate(metadata.seq_lens.tolist()):
        start, stop = starts[s : s + 2]
        if start == stop:
            continue
        length = stop - start
        first = 0 if window is None else max(0, context - length - window + 1)
        begin = first // metadata.block_size
        blocks = metadata.block_tables[s, begin : -(-context // metadata.block_size)]
        skipped = begin * metadata.block_size
        mask = sdpa.causal_mask(length, context - first, window)
        spans.append(_Span(start, stop, mx.array(blocks), first - skipped, context - skipped, mask))
    return tuple(spans)
