"""When a step's results are processed: at once, or while the next step runs.

``overlap`` keeps one step in flight. A worker thread runs the model, one batch at a time in
the order of ``submit``, and nothing else: requests, blocks and sampling stay with the thread
that calls. Where the model's arrays are lazy there is no worker: the caller builds a step's
graph, and MLX computes it. So while step N runs, the host schedules and builds step N+1; once
N's tokens are sampled, the rows of N+1 that wait for them are filled in and N+1 is launched;
then N's results are processed (append, stop, free, detokenise) while N+1 runs.

Invariants, each pinned by a test:

- The tokens are those of ``sync``: a row is launched only when its token is known.
- A request that ends while a step is in flight has one row too many in it, whose result is
  dropped. Its blocks may be handed out again at once: whoever gets them is launched after
  the step in flight has ended, and writes a slot before reading it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from labkit.config import Pipeline as Name
from labkit.engine.input_builder import Batch
from labkit.engine.logits import Logits
from labkit.engine.sampler import Sampled
from labkit.engine.scheduler_output import SchedulerOutput
from labkit.engine.stats import Counters

RunModel = Callable[[Batch], Logits]
# Starts a step; what it returns waits for the logits.
Launch = Callable[[Batch], Callable[[], Logits]]
Results = dict[str, Sequence[Sampled]]
Sample = Callable[[SchedulerOutput, Batch, Logits], Results]


@dataclass(frozen=True, slots=True)
class Done:
    """A step whose tokens are sampled: what ``Scheduler.update`` takes."""

    scheduled: SchedulerOutput
    sampled: Results


class Pipeline(Protocol):
    """Runs steps in the order of ``submit``; only one forward runs at a time."""

    name: str

    def submit(self, scheduled: SchedulerOutput, batch: Batch) -> Done | None:
        """Start a step; return the one whose results are to be processed now, if any."""

    def drain(self) -> Done | None:
        """Return the step in flight when it is done; None if there is none."""

    def discard(self) -> None:
        """Drop the step in flight when it is done: every request in it has ended."""

    def close(self) -> None:
        """Drop the step in flight and what the pipeline holds."""


class Sync:
    """A step's results are processed before the next is scheduled: nothing is in flight."""

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

    discard = close = drain


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that is running; ``logits`` waits for its result."""

    scheduled: SchedulerOutput
    batch: Batch
    logits: Callable[[], Logits]


class Overlap:
    """Keeps one step in flight.

    Parameters
    ----------
    run_model
        Called in the worker thread.
    launch
        Called in the caller's thread, where the model runs on lazy arrays; None: it does not.
    sample
        Called in the caller's thread.
    counters
        ``pipeline.overlapped``: steps launched before the results of the one before were
        processed; ``pipeline.wait_ms``: how long the host had nothing to do but wait.
    """

    name = "overlap"

    def __init__(
        self,
        run_model: RunModel,
        sample: Sample,
        counters: Counters,
        launch: Launch | None = None,
    ) -> None:
        self._worker: ThreadPoolExecutor | None = None
        if launch is None:
            self._worker = ThreadPoolExecutor(1, "labkit-step", initializer=_same_threads())
            launch = _in_worker(self._worker, run_model)
        self._launch = launch
        self._sample = sample
        self._counters = counters
        self._flight: _Flight | None = None

    def submit(self, scheduled: SchedulerOutput, batch: Batch) -> Done | None:
        """Launch a step as soon as the one in flight is sampled; return the latter."""
        done = self.drain()
        fill_in(batch, {} if done is None else done.sampled)
        self._flight = _Flight(scheduled, batch, self._launch(batch))
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
            return flight.logits()
        finally:
            self._counters.add("pipeline.wait_ms", (time.perf_counter() - start) * 1e3)

    def close(self) -> None:
        """End the worker thread after the step in flight."""
        self._flight = None
        if self._worker is not None:
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


def _in_worker(worker: ThreadPoolExecutor, run_model: RunModel) -> Launch:
    def launch(batch: Batch) -> Callable[[], Logits]:
        return worker.submit(run_model, batch).result

    return launch


def _same_threads() -> Callable[[], None]:
    """Return what gives another thread this one's number of numba threads."""
    import numba

    count = numba.get_num_threads()
    return lambda: numba.set_num_threads(count)


def create(
    name: Name,
    run_model: RunModel,
    sample: Sample,
    counters: Counters,
    launch: Launch | None = None,
) -> Pipeline:
    """Return the pipeline of ``engine.pipeline``; ``launch``: see ``Overlap``."""
    if name is Name.overlap:
        return Overlap(run_model, sample, counters, launch)
    return Sync(run_model, sample)
