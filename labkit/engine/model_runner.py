"""Runs batches: the layout plans the step's attention, then one forward."""

from __future__ import annotations

import time

from labkit.engine.forward import Forward, Wait
from labkit.engine.input_builder import Batch
from labkit.engine.kv_layout.kv_cache import KVMemory
from labkit.engine.logits import Logits
from labkit.engine.stats import Counters


class ModelRunner:
    """The model and its KV memory, as one call per step."""

    def __init__(self, forward: Forward, memory: KVMemory, counters: Counters) -> None:
        self.memory = memory
        self._forward = forward
        self._counters = counters

    @property
    def lazy(self) -> bool:
        """Whether ``launch`` returns before a step is computed."""
        return self._forward.name == "mlx" and self.memory.attention.arrays != "numpy"

    def __call__(self, batch: Batch) -> Logits:
        """Return logits [len(batch.logit_rows), vocabulary], float32."""
        return self.launch(batch, ahead=False)()

    def launch(self, batch: Batch, *, ahead: bool = True) -> Wait:
        """Start a step, or run it; what is returned waits for its logits."""
        computed, step = self.memory.plan(batch)
        start = time.perf_counter()
        waiting = self._forward.launch(computed, step, self._counters, ahead=ahead)

        def wait() -> Logits:
            logits = waiting()
            self._counters.add("device_ms", (time.perf_counter() - start) * 1e3)
            return logits

        self._counters.add(f"forward.{self._forward.name}")
        if computed.total_q > batch.total_q:
            self._counters.add("tokens.padded", computed.total_q - batch.total_q)
        self._counters.add_all(step.counters)
        return wait
