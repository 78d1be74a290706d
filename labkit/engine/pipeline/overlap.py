"""``engine.pipeline=overlap``: one step is in flight while the host looks after another.

A worker thread runs the model, one batch at a time in the order of ``submit``, and nothing
else: requests, blocks and sampling stay with the thread that calls. So while step N runs,
the host schedules and builds step N+1; once N's tokens are sampled, the rows of N+1 that
wait for them are filled in and N+1 is launched; then N's results are processed (append,
stop, free, detokenise) while N+1 runs.

Invariants, each pinned by a test:

- The tokens are those of ``sync``: a row is launched only when its token is known.
- A request that ends while a step is in flight has one row too many in it, whose result is
  dropped. Its blocks may be handed out again at once: whoever gets them is launched after
  the step in flight has ended, and writes a slot before reading it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from labkit.engine.input_builder import Batch
from labkit.engine.logits import Logits
from labkit.engine.pipeline.base import Done, Results, RunModel, Sample
from labkit.engine.scheduler_output import SchedulerOutput
from labkit.engine.stats import Counters


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is running; ``logits`` is its result to be."""

    scheduled: SchedulerOutput
    batch: Batch
    logits: Future[Logits]


class Overlap:
    """Keeps one step in flight.

    Parameters
    ----------
    run_model
        Called in the worker thread.
    sample
        Called in the caller's thread.
    counters
        ``pipeline.overlapped``: steps launched before the results of the one before were
        processed; ``pipeline.wait_ms``: how long the host had nothing to do but wait.
    """

    name = "overlap"

    def __init__(self, run_model: RunModel, sample: Sample, counters: Counters) -> None:
        self._run_model = run_model
        self._sample = sample
        self._counters = counters
        self._flight: _Flight | None = None
        self._worker = ThreadPoolExecutor(1, "labkit-step", initializer=_same_threads())

    def submit(self, scheduled: SchedulerOutput, batch: Batch) -> Done | None:
        """Launch a step as soon as the one in flight is sampled; return the latter."""
        done = self.drain()
        fill_in(batch, {} if done is None else done.sampled)
        self._flight = _Flight(scheduled, batch, self._worker.submit(self._run_model, batch))
        if done is not None:
            self._counters.add("pipeline.overlapped")
        return done

    def drain(self) -> Done | None:
        """Wait for the step in flight and sample it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        logits = self._wait(flight)
        return Done(flight.scheduled, self._sample(flight.scheduled, flight.batch, logits))

    def discard(self) -> None:
        """Wait for the step in flight and drop its results."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._wait(flight)

    def _wait(self, flight: _Flight) -> Logits:
        start = time.perf_counter()
        try:
            return flight.logits.result()
        finally:
            self._counters.add("pipeline.wait_ms", (time.perf_counter() - start) * 1e3)

    def close(self) -> None:
        """End the worker thread after the step in flight."""
        self._flight = None
        self._worker.shutdown()


def fill_in(batch: Batch, sampled: Results) -> None:
    """Put the tokens that a step had to wait for in their places.

    Raises
    ------
    RuntimeError
        A token is still unknown: the step would compute on nothing.
    """
    for row, request_id in batch.unknown:
        if request_id in sampled:
            batch.tokens[row] = sampled[request_id][-1].token
    if batch.tokens.size and batch.tokens.min() < 0:
        raise RuntimeError("a step was launched before the tokens it computes were known")


def _same_threads() -> Callable[[], None]:
    """Return what gives another thread this one's number of numba threads."""
    import numba

    count = numba.get_num_threads()
    return lambda: numba.set_num_threads(count)
