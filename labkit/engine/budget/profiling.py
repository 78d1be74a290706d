"""The profiling forward: what the largest step allocates besides weights and KV."""

from __future__ import annotations

import sys
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np

from labkit import config
from labkit.engine.input_builder import Batch
from labkit.engine.kv_pools import KVPools, LayerShape
from labkit.engine.stats import Counters

if TYPE_CHECKING:
    from labkit.engine.attention.base import AttentionBackend
    from labkit.engine.forward import Forward

STEP = 1 << 20  # bytes: rounded up to it, so that equal arms get equal pools


def activation_bytes(
    forward: Forward,
    backend: AttentionBackend,
    shapes: tuple[LayerShape, ...],
    scheduler: config.Scheduler,
    block_size: int,
) -> int:
    """Run the largest step twice and return the second's peak (bytes, NumPy's and MLX's).

    The step is ``max_num_batched_tokens`` prompt tokens of ``max_num_seqs`` requests, all
    of which sample. The first forward compiles and fills caches.
    """
    batch, num_blocks = largest_step(scheduler, block_size)
    pools = KVPools(shapes, num_blocks, block_size)
    meta = backend.plan(
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        block_size=block_size,
        total_q=batch.total_q,
    )
    forward(batch, meta, pools, backend, Counters())
    mlx_before = _mlx_active()
    tracemalloc.start(1)
    try:
        forward(batch, meta, pools, backend, Counters())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    peak += max(0, _mlx_peak() - mlx_before)
    return -(-peak // STEP) * STEP


def largest_step(scheduler: config.Scheduler, block_size: int) -> tuple[Batch, int]:
    """Return the batch, token ids all 0, and the blocks it needs, the null block included."""
    tokens, rows = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    lengths = np.full(rows, tokens // rows, np.int32)
    lengths[: tokens % rows] += 1
    cu_seqlens_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    per_row = -(-int(lengths.max()) // block_size)
    tables = 1 + np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
    batch = Batch(
        tokens=np.zeros(tokens, np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=lengths,
        block_tables=tables,
        logit_rows=cu_seqlens_q[1:] - 1,
        sampling=(),
        prefill_tokens=tokens,
    )
    return batch, rows * per_row + 1


def _mlx_active() -> int:
    """Return MLX's bytes in use, and start its peak anew (0 where MLX is not loaded)."""
    if "mlx.core" not in sys.modules:
        return 0
    import mlx.core as mx

    mx.reset_peak_memory()
    return int(mx.get_active_memory())


def _mlx_peak() -> int:
    if "mlx.core" not in sys.modules:
        return 0
    import mlx.core as mx

    return int(mx.get_peak_memory())
