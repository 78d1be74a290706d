"""Runs batches: plans the attention once per step, then one forward."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from labkit.engine.forward import Forward, Logits
from labkit.engine.input_builder import Batch
from labkit.engine.kv_pools import KVPools
from labkit.engine.stats import Counters

if TYPE_CHECKING:
    from labkit.engine.attention.base import AttentionBackend


class ModelRunner:
    """The model, its KV memory and the attention backend, as one call per step."""

    def __init__(
        self, forward: Forward, backend: AttentionBackend, pools: KVPools, counters: Counters
    ) -> None:
        self.pools = pools
        self._forward = forward
        self._backend = backend
        self._counters = counters

    def __call__(self, batch: Batch) -> Logits:
        """Return logits [len(batch.logit_rows), vocabulary], float32."""
        meta = self._backend.plan(
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            cu_seqlens_q=batch.cu_seqlens_q,
            block_size=self.pools.block_size,
            total_q=batch.total_q,
        )
        start = time.perf_counter()
        logits = self._forward(batch, meta, self.pools, self._backend, self._counters)
        self._counters.add("attention.map_us", meta.map_us)
        self._counters.add("device_ms", (time.perf_counter() - start) * 1e3)
        self._counters.add(f"forward.{self._forward.name}")
        return logits
