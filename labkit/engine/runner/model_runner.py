"""The runner of a model over its KV memory, called once per step.

``engine.forward`` selects it: one forward for the whole batch, or one for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from labkit.engine.engine_protocol import Counters
from labkit.engine.runner.batch import Batch, split
from labkit.engine.sampling.lazy_logits import Logits, WaitLogits

if TYPE_CHECKING:
    from labkit.engine.kv_layout.kv_cache_manager import KVMemory
    from labkit.engine.model.packed_forward import PackedForward

RunModel = Callable[[Batch], Logits]


class ModelRunner:
    """Runs batches: prepares the step's attention, then runs one forward.

    ``replay``: whether steps are replayed from a captured graph if they can be.
    """

    def __init__(
        self,
        forward: PackedForward,
        memory: KVMemory,
        counters: Counters,
        *,
        replay: bool = True,
    ) -> None:
        self.memory = memory
        self._forward = forward
        self._counters = counters
        self._replay = replay
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
        wait_logits = self._forward.launch(
            padded, attention, self._counters, ahead=ahead, replay=self._replay
        )
        self._counters.add("forwards.batched")
        self._counters.add(self._counter)
        self._counters.add_all(attention.counters)
        if padded is not batch:
            self._counters.add("tokens.padded", padded.total_q - batch.total_q)
        return wait_logits


class PerRequestRunner(ModelRunner):
    """Runs one forward for each request of a batch, so that no two share a read of the weights.

    This is what both schedulers of the article "Inference Engines 2/N" do.
    """

    @property
    def is_lazy(self) -> bool:
        """False: each forward is computed before the next is launched."""
        return False

    def launch(self, batch: Batch, *, ahead: bool = True) -> WaitLogits:
        """Compute a step, request by request, and return a function that returns its logits."""
        rows: list[np.ndarray] = []
        step_counters: Mapping[str, float] = {}
        for part in split(batch):
            prepared, attention = self.memory.prepare_step(part)
            wait_logits = self._forward.launch(
                prepared, attention, self._counters, ahead=False, replay=self._replay
            )
            rows.append(np.asarray(wait_logits()))
            step_counters = attention.counters
        self._counters.add("forwards.per_request", len(rows))
        self._counters.add(self._counter)
        self._counters.add_all(step_counters)
        logits = np.concatenate(rows)[_places(batch)]
        return lambda: logits


def _places(batch: Batch) -> np.ndarray:
    """Return, for each row of logits of the batch, its place among the rows of its parts."""
    return np.argsort(np.argsort(batch.logit_rows, kind="stable"), kind="stable")
