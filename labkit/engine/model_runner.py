"""Runs batches: the layout plans the step's attention, then one forward."""

from __future__ import annotations

import time

from labkit.engine.forward import Forward, Logits
from labkit.engine.input_builder import Batch
from labkit.engine.kv_layout.base import KVMemory
from labkit.engine.stats import Counters


class ModelRunner:
    """The model and its KV memory, as one call per step."""

    def __init__(self, forward: Forward, memory: KVMemory, counters: Counters) -> None:
        self.memory = memory
        self._forward = forward
        self._counters = counters

    def __call__(self, batch: Batch) -> Logits:
        """Return logits [len(batch.logit_rows), vocabulary], float32."""
        computed, attention = self.memory.plan(batch)
        start = time.perf_counter()
        logits = self._forward(computed, attention, self._counters)
        self._counters.add("device_ms", (time.perf_counter() - start) * 1e3)
        self._counters.add(f"forward.{self._forward.name}")
        if computed.total_q > batch.total_q:
            self._counters.add("tokens.padded", computed.total_q - batch.total_q)
        self._counters.add_all(attention.counters())
        return logits
