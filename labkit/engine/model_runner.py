"""Runs batches: the layout plans the step's attention, then one forward; and how a step starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from labkit import config
from labkit.engine.batch import Batch
from labkit.engine.device_logits import Logits, WaitLogits
from labkit.engine.engine_protocol import Counters, EngineError

if TYPE_CHECKING:
    from labkit.engine.kv_layout.kv_cache_manager import KVMemory
    from labkit.engine.packed_forward import PackedForward

RunModel = Callable[[Batch], Logits]


class ModelRunner:
    """The model and its KV memory, as one call per step."""

    def __init__(self, forward: PackedForward, memory: KVMemory, counters: Counters) -> None:
        self.memory = memory
        self._forward = forward
        self._counters = counters
        self._counted = f"forward.{forward.name}"

    @property
    def lazy(self) -> bool:
        """Whether ``launch`` returns before a step is computed."""
        return self._forward.name == "mlx" and self.memory.attention.arrays != "numpy"

    def __call__(self, batch: Batch) -> Logits:
        """Return logits [len(batch.logit_rows), vocabulary], float32."""
        return self.launch(batch, ahead=False)()

    def launch(self, batch: Batch, *, ahead: bool = True) -> WaitLogits:
        """Start a step, or run it; what is returned waits for its logits."""
        computed, step = self.memory.plan(batch)
        wait = self._forward.launch(computed, step, self._counters, ahead=ahead)
        self._counters.add(self._counted)
        self._counters.add_all(step.counters)
        if computed is not batch:
            self._counters.add("tokens.padded", computed.total_q - batch.total_q)
        return wait


class StepLauncher:
    """Starts steps, one at a time; as it is, a step runs when somebody waits for it."""

    def __init__(self, run_model: RunModel) -> None:
        self.run_model = run_model

    def launch(self, batch: Batch) -> WaitLogits:
        """Start a step; what is returned waits for its logits."""
        return partial(self.run_model, batch)

    def close(self) -> None:
        """Drop the model, after the step in flight."""
        self.run_model = _closed


class AsyncStepLauncher(StepLauncher):
    """Steps that run while the host does something else.

    Counted is ``pipeline.wait_ms``: how long the host could do nothing but wait.
    """

    def __init__(self, run_model: RunModel, counters: Counters) -> None:
        super().__init__(run_model)
        self._counters = counters

    def _waited(self, wait: WaitLogits) -> Logits:
        start = time.perf_counter()
        try:
            return wait()
        finally:
            self._counters.add("pipeline.wait_ms", (time.perf_counter() - start) * 1e3)


class ThreadStepLauncher(AsyncStepLauncher):
    """Runs the steps in a thread of their own, in the order of ``launch``, and nothing else."""

    def __init__(self, run_model: RunModel, counters: Counters) -> None:
        super().__init__(run_model, counters)
        self._worker = ThreadPoolExecutor(1, "labkit-step", initializer=_same_threads())

    def launch(self, batch: Batch) -> WaitLogits:
        """Hand a step to the worker."""
        return partial(self._waited, self._worker.submit(self.run_model, batch).result)

    def close(self) -> None:
        """End the worker after the step in flight."""
        self._worker.shutdown()
        super().close()


class LazyStepLauncher(AsyncStepLauncher):
    """Builds a step's graph at once, and MLX computes it meanwhile: there is no worker."""

    run_model: ModelRunner

    def launch(self, batch: Batch) -> WaitLogits:
        """Dispatch a step's graph."""
        return partial(self._waited, self.run_model.launch(batch))


def create_launcher(
    pipeline: config.Pipeline, run_model: RunModel, counters: Counters
) -> StepLauncher:
    """Return how a pipeline starts steps."""
    if pipeline is config.Pipeline.sync:
        return StepLauncher(run_model)
    lazy = isinstance(run_model, ModelRunner) and run_model.lazy
    return (
        LazyStepLauncher(run_model, counters) if lazy else ThreadStepLauncher(run_model, counters)
    )


def _closed(_batch: Batch) -> Logits:
    raise EngineError("the engine is closed")


def _same_threads() -> Callable[[], None]:
    """Return what gives another thread this one's number of numba threads."""
    import numba

    count = numba.get_num_threads()
    return lambda: numba.set_num_threads(count)
