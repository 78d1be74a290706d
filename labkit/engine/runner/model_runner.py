"""The runner of a model over its KV memory, and the launchers that call it once per step.

``engine.forward`` selects the runner: one forward for the whole batch, or one for each request.
``engine.pipeline`` selects the launcher: in the calling thread, in a worker thread, or as lazy MLX
graphs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from labkit import config
from labkit.engine.batch import Batch, split
from labkit.engine.engine_protocol import Counters, EngineError
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


class StepLauncher:
    """Launches one step at a time. This base class runs a step when its logits are requested."""

    def __init__(self, run_model: RunModel) -> None:
        self.run_model = run_model

    def launch(self, batch: Batch) -> WaitLogits:
        return partial(self.run_model, batch)

    def wait_idle(self) -> None:
        """Return once no thread runs a step, whether or not the steps have failed."""

    def close(self) -> None:
        """Release the model. Every later launch raises ``EngineError``."""
        self.run_model = self.launch = _raise_closed  # type: ignore[method-assign]


class AsyncStepLauncher(StepLauncher):
    """Base class of launchers whose steps run while the host does other work.

    The counter ``pipeline.wait_ms`` is the time in which the host only waited.
    """

    def __init__(self, run_model: RunModel, counters: Counters) -> None:
        super().__init__(run_model)
        self._counters = counters

    def _timed_wait(self, wait: WaitLogits) -> Logits:
        start = time.perf_counter()
        try:
            return wait()
        finally:
            self._counters.add("pipeline.wait_ms", (time.perf_counter() - start) * 1e3)


class ThreadStepLauncher(AsyncStepLauncher):
    """Runs steps in one worker thread, in the order of ``launch``."""

    def __init__(self, run_model: RunModel, counters: Counters) -> None:
        super().__init__(run_model, counters)
        from labkit.cpu.runtime.thread_pool import copy_num_threads

        self._worker = ThreadPoolExecutor(1, "labkit-step", initializer=copy_num_threads())
        self._last: Future[Logits] | None = None

    def launch(self, batch: Batch) -> WaitLogits:
        self._last = self._worker.submit(self.run_model, batch)
        return partial(self._timed_wait, self._last.result)

    def wait_idle(self) -> None:
        if self._last is not None:
            futures.wait([self._last])

    def close(self) -> None:
        self._worker.shutdown()
        super().close()


class LazyStepLauncher(AsyncStepLauncher):
    """Builds a step's graph, which MLX computes asynchronously without a worker thread."""

    run_model: ModelRunner

    def launch(self, batch: Batch) -> WaitLogits:
        return partial(self._timed_wait, self.run_model.launch(batch))


def create_launcher(
    pipeline: config.Pipeline, run_model: RunModel, counters: Counters
) -> StepLauncher:
    """Return the launcher for ``engine.pipeline`` and the kind of model."""
    if pipeline is config.Pipeline.sync:
        return StepLauncher(run_model)
    if isinstance(run_model, ModelRunner) and run_model.is_lazy:
        return LazyStepLauncher(run_model, counters)
    return ThreadStepLauncher(run_model, counters)


def _raise_closed(batch: Batch) -> NoReturn:
    raise EngineError("the engine is closed")
