"""The launchers of steps: ``engine.pipeline`` selects how a step's model is run.

The model runs in the calling thread, in a worker thread, or as lazy MLX graphs.
"""

from __future__ import annotations

import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NoReturn

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.runner.model_runner import ModelRunner, RunModel
from labkit.engine.sampling.step_logits import Logits, WaitLogits


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
