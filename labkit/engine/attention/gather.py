"""``gather``: copy a request's blocks into one contiguous array, then MLX's attention.

What a paged cache costs without a kernel that reads block tables: every step copies all
the keys and values that it attends to, once per layer and request.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import sdpa, validate
from labkit.engine.attention.base import Array
from labkit.engine.attention.metadata import AttentionMetadata
from labkit.engine.attention.paged_backend import PagedBackend
from labkit.engine.attention.report import LaunchReport


class GatherBackend(PagedBackend):
    """Attention per request over gathered blocks: float32, no softcap, no stamp."""

    name = "gather"

    def attend(
        self,
        q: Array,
        k_pool: Array,
        v_pool: Array,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        out: Array | None = None,
    ) -> tuple[Array, LaunchReport]:
        """Gather and attend, request by request; see ``AttentionBackend.attend``."""
        validate.operands(
            q,
            k_pool,
            v_pool,
            total_q=meta.total_q,
            block_size=meta.block_size,
            max_block_id=meta.max_block_id,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            out=out,
        )
        validate.float32(q)
        if softcap is not None:
            raise ValueError(f"softcap={softcap}: MLX's attention has none; use backend=fused")
        out = np.empty_like(q) if out is None else out
        results: list[tuple[int, int, mx.array]] = []
        blocks = gathered = 0
        for s, context in enumerate(meta.seq_lens.tolist()):
            start, stop = meta.cu_seqlens_q[s : s + 2].tolist()
            if start == stop:
                continue
            first = 0 if window is None else max(0, context - (stop - start) - window + 1)
            k, v = (
                _gather(pool, meta.block_tables[s], first, context, meta.block_size)
                for pool in (k_pool, v_pool)
            )
            one = sdpa.attend_one(q[start:stop], k, v, scale=scale, window=window, sinks=sinks)
            results.append((start, stop, one))
            blocks += -(-context // meta.block_size) - first // meta.block_size
            gathered += k.nbytes + v.nbytes
        mx.eval([one for *_, one in results])
        for start, stop, one in results:
            out[start:stop] = np.asarray(one)[0].transpose(1, 0, 2)
        return out, LaunchReport(
            kernel="gather",
            grid=(len(results),),
            reason="blocks are gathered for MLX's attention",
            resolver="none",
            stamp=None,
            expected_stamp=None,
            search_iterations=0,
            surplus_threadgroups=0,
            kv_blocks_visited=blocks,
            bytes=gathered + 2 * q.nbytes,
            map_us=meta.map_us,
        )


def _gather(
    pool: Array, table: NDArray[np.int32], first: int, context: int, block_size: int
) -> mx.array:
    """Copy the keys ``first`` to ``context`` of a sequence: [1, heads, keys, head_dim]."""
    begin = first // block_size
    blocks = pool[table[begin : -(-context // block_size)]]
    tokens = blocks.reshape(-1, *pool.shape[2:])
    return sdpa.heads_first(tokens[None, first - begin * block_size : context - begin * block_size])
