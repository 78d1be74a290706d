"""The runner of a model over its KV memory.

``engine.forward`` selects the runner: one forward for the whole batch, or one for each request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from labkit.engine.batch import Batch, split
from labkit.engine.engine_protocol import Counters
from labkit.engine.sampling.step_logits import Logits, WaitLogits

if TYPE_CHECKING:
    from labkit.engine.kv_cache_interface import KVCache
    from labkit.engine.runner.packed_forward import PackedForward

RunModel = Callable[[Batch], Logits]


class ModelRunner:
    """Runs batches: prepares the step's attention, then runs one forward.

    ``replay``: whether steps are replayed from a captured graph if they can be.
    """

    def __init__(
        self, forward: PackedForward, memory: KVCache, counters: Counters, *, replay: bool = True
    ) -> None:
        self.memory = memory
        self._forward = forward
        self._counters = counters
        self._replay = replay
        self._counter = f"forward.{forward.name}"

    @property
    def is_lazy(self) -> bool:
        """Whether ``launch`` returns before the step is computed."""
        return self._forward.name == "mlx" and self.memory.attention.is_lazy

    @property
    def runs_on_numpy(self) -> bool:
        """Whether the model runs on NumPy arrays and labkit's kernels, so its parts have clocks."""
        return self._forward.name == "numpy"

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

    is_lazy = False  # each forward is computed before the next is launched

    def launch(self, batch: Batch, *, ahead: bool = True) -> WaitLogits:
        rows: list[np.ndarray] = []
        step_counters: defaultdict[str, float] = defaultdict(float)
        for part in split(batch):
            prepared, attention = self.memory.prepare_step(part)
            wait_logits = self._forward.launch(
                prepared, attention, self._counters, ahead=False, replay=self._replay
            )
            rows.append(np.asarray(wait_logits()))
            for name, amount in attention.counters.items():
                step_counters[name] += amount
        self._counters.add("forwards.per_request", len(rows))
        self._counters.add(self._counter)
        # ``layout.<name>`` counts steps, the other counters are sums over the requests.
        steps: dict[str, float] = {n: 1 for n in step_counters if n.startswith("layout.")}
        self._counters.add_all(step_counters | steps)
        logits = np.concatenate(rows)[_places(batch)]
        return lambda: logits


def _places(batch: Batch) -> np.ndarray:
    return np.argsort(np.argsort(batch.logit_rows, kind="stable"), kind="stable")
