"""``gather``: copy a request's blocks into one contiguous array, then MLX's attention.

What a paged cache costs without a kernel that reads block tables: every step copies all
the keys and values that it attends to, once per layer and request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from labkit.engine.attention import sdpa
from labkit.engine.attention.attention_metadata import Layer, Plan
from labkit.engine.attention.launch_report import LaunchReport
from labkit.engine.attention.mlx_backend import LazyBackend


class GatherBackend(LazyBackend):
    """Attention per request over gathered blocks: no softcap, no stamp."""

    name = "gather"

    def _refuse(self, layer: Layer) -> None:
        if layer.softcap is not None:
            raise ValueError(
                f"softcap={layer.softcap}: MLX's attention has none; use backend=fused"
            )

    def attend(self, layer: Layer, q: Any, plan: Plan, out: Any) -> tuple[Any, LaunchReport]:
        """Gather and attend, request by request; see ``PagedBackend.attend``."""
        if layer.kind not in plan.prepared:
            plan.prepared[layer.kind] = _spans(plan, layer.window)
        spans: tuple[_Span, ...] = plan.prepared[layer.kind]
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
            map_us=plan.map_us,
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


def _spans(plan: Plan, window: int | None) -> tuple[_Span, ...]:
    """Return a span for every request that has queries."""
    spans, starts = [], plan.cu_seqlens_q.tolist()
    for s, context in enumerate(plan.seq_lens.tolist()):
        start, stop = starts[s : s + 2]
        if start == stop:
            continue
        length = stop - start
        first = 0 if window is None else max(0, context - length - window + 1)
        begin = first // plan.block_size
        blocks = plan.block_tables[s, begin : -(-context // plan.block_size)]
        skipped = begin * plan.block_size
        mask = sdpa.mask_of_one(length, context - first, window)
        spans.append(_Span(start, stop, mx.array(blocks), first - skipped, context - skipped, mask))
    return tuple(spans)
