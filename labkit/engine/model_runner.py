"""The runner of a model over its KV memory, called once per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.engine.batch import Batch
from labkit.engine.engine_protocol import Counters
from labkit.engine.lazy_logits import Logits, WaitLogits

if TYPE_CHECKING:
    from labkit.engine.kv_layout.kv_cache_manager import KVMemory
    from labkit.engine.packed_forward import PackedForward

RunModel = Callable[[Batch], Logits]


class ModelRunner:
    """Runs batches: prepares the step's attention, then runs one forward."""

    def __init__(self, forward: PackedForward, memory: KVMemory, counters: Counters) -> None:
        self.memory = memory
        self._forward = forward
        self._counters = counters
        self._counter = f"forward.{forward.name}"

    @property
    def is_lazy(self) -> bool:
        """Whether ``launch`` returns before the step is computed."""
        return self._forward.name == "mlx" and self.memory.attention.arrays != "numpy"

    def __call__(self, batch: Batch) -> Logits:
        """Run a step and return its logits, float32 [len(batch.logit_rows), vocabulary]."""
        return self.launch(batch, ahead=False)()

    def launch(self, batch: Batch, *, ahead: bool = True) -> WaitLogits:
        """Launch a step and return a function that waits for its logits and returns them.

        The step is computed before ``launch`` returns if the model runs on NumPy arrays, or if
        ``ahead`` is false.
        """
        padded, attention = self.memory.prepare_step(batch)
        wait_logits = self._forward.launch(padded, attention, self._counters, ahead=ahead)
        self._counters.add(self._counter)
        self._counters.add_all(attention.counters)
        if padded is not batch:
            self._counters.add("tokens.padded", padded.total_q - batch.total_q)
        return wait_logits
