"""Launch steps of a model: synchronously, in a worker thread, or as lazy MLX graphs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.lazy_logits import Logits, WaitLogits
from labkit.engine.model_runner import ModelRunner, RunModel


class StepLauncher:
    """Launches one step at a time. This base class runs a step when its logits are requested."""

    def __init__(self, run_model: RunModel) -> None:
        self.run_model = run_model

    def launch(self, batch: Batch) -> WaitLogits:
        """Return a function that runs the step and returns its logits."""
        return partial(self.run_model, batch)

    def close(self) -> None:
        """Drop the model, once the step in flight has ended."""
        self.run_model = _raise_closed


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

    def launch(self, batch: Batch) -> WaitLogits:
        """Submit a step to the worker thread."""
        return partial(self._timed_wait, self._worker.submit(self.run_model, batch).result)

    def close(self) -> None:
        """End the worker thread after the step in flight."""
        self._worker.shutdown()
        super().close()


class LazyStepLauncher(AsyncStepLauncher):
    """Builds a step's graph, which MLX computes asynchronously without a worker thread."""

    run_model: ModelRunner

    def launch(self, batch: Batch) -> WaitLogits:
        """Build a step's graph and start its computation."""
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


def _raise_closed(_batch: Batch) -> Logits:
    raise EngineError("the engine is closed")
