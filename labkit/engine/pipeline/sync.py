"""``engine.pipeline=sync``: a step's results are processed before the next is scheduled."""

from __future__ import annotations

from labkit.engine.input_builder import Batch
from labkit.engine.pipeline.base import Done, RunModel, Sample
from labkit.engine.scheduler_output import SchedulerOutput


class Sync:
    """Run the model, sample, done."""

    name = "sync"

    def __init__(self, run_model: RunModel, sample: Sample) -> None:
        self._run_model = run_model
        self._sample = sample

    def submit(self, scheduled: SchedulerOutput, batch: Batch) -> Done:
        """Compute the step and return its results."""
        logits = self._run_model(batch)
        return Done(scheduled, self._sample(scheduled, batch, logits))

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def discard(self) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """Nothing to wait for."""
