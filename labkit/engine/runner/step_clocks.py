"""Clocks on the parts of engine steps: where the time of steps goes.

Clocks replace the parts of the engine's loop by functions that time them. Without clocks no code of
this module runs. The parts of a step:

    schedule    the scheduler's choice, without drafting
    draft       drafting
    build       packed arrays, and padding rows of pure decodes
    plan        block tables and maps for attention (``KVMemory.prepare_step``)
    attention   the attention of all layers, with the writes of keys and values
    products    the products with the weights
    rest        everything else in the forward
    model       the whole forward, in place of the three parts above, where it is one graph or runs
                beside the host's work. With ``engine.pipeline=overlap`` it is the time that the
                host spends on launching it and on waiting for it
    sample      sampling and the acceptance of drafts
    update      append tokens, end requests, cache full blocks and free memory
    idle        no request to compute, or the thread of the step waits outside of the parts
    left_over   the rest of the time: between parts, and of the client between steps
    stalls      what single steps took beyond the median of their part: the excess over it where a
                step took more than ``STALL_RATIO`` times the median and ``STALL_S`` more. The parts
                of the forward of steps with prompt tokens, which vary by nature, have no stalls

Steps with prompt tokens and steps without are summed apart (``prefill``, ``decode``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.runtime.forward_clock import ForwardClock
from labkit.engine.engine_protocol import InferenceEngine, TokenEvent
from labkit.engine.engine_step import PendingStep, StepParts, StepResults
from labkit.engine.runner.model_runner import AsyncStepLauncher, ModelRunner, StepLauncher

if TYPE_CHECKING:
    from labkit.engine.batch import Batch
    from labkit.engine.kv_cache_manager import KVMemory, StepAttention
    from labkit.engine.sampling.lazy_logits import Logits, WaitLogits
    from labkit.engine.scheduler.scheduler_output import SchedulerOutput

Clock = Callable[[], float]
PARTS = (
    "schedule", "draft", "build", "plan", "attention", "products", "rest", "model", "sample",
    "update", "idle", "left_over", "stalls",
)  # fmt: skip
(
    SCHEDULE, DRAFT, BUILD, PLAN, ATTENTION, PRODUCTS, REST, MODEL, SAMPLE, UPDATE, IDLE, LEFT,
    STALLS,
) = range(len(PARTS))  # fmt: skip
STALL_RATIO, STALL_S = 3.0, 0.001
LONG_GAP_S = 0.0001
CALIBRATION_STEPS = 64


class StepClocks:
    """The times of an engine's steps by part. ``clock`` returns seconds.

    ``begin`` is called before the first step, and ``end_step`` after each step.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._forward = ForwardClock()
        self._seconds = [0.0] * len(PARTS)  # of the step in progress
        # Time and CPU time where a gap began. A gap is the time of a step before or after its
        # parts. The CPU clock is a slow system call, so it is read only after a step with long gaps
        self._edge: tuple[float, float | None] | None = None
        self._gap_s, self._watches_gaps = 0.0, False
        self._kind = "decode"
        # By kind of step, each step's seconds by part. What the client waited stands for stalls.
        self._steps: dict[str, list[tuple[float, ...]]] = {}

    def time_parts(self, parts: StepParts) -> StepParts:
        """Return functions that call the parts of a step and time them."""
        clock, seconds = self._clock, self._seconds

        def schedule() -> SchedulerOutput:
            self._leave_gap()
            start = clock()
            scheduled = parts.schedule()
            seconds[SCHEDULE] += clock() - start
            return scheduled

        def draft(scheduled: SchedulerOutput) -> SchedulerOutput:
            start = clock()
            drafted = parts.draft(scheduled)
            spent = clock() - start
            seconds[DRAFT] += spent
            seconds[SCHEDULE] -= spent  # ``schedule`` calls ``draft``
            return drafted

        def build(scheduled: SchedulerOutput) -> Batch:
            start = clock()
            batch = parts.build(scheduled)
            seconds[BUILD] += clock() - start
            self._kind = "prefill" if batch.prefill_tokens else "decode"
            return batch

        def sample(pending: PendingStep, logits: Logits) -> StepResults:
            start = clock()
            results = parts.sample(pending, logits)
            seconds[SAMPLE] += clock() - start
            return results

        def update(results: StepResults) -> list[TokenEvent]:
            start = clock()
            events = parts.update(results)
            seconds[UPDATE] += clock() - start
            self._enter_gap()
            return events

        return StepParts(schedule, draft, build, sample, update)

    def time_launcher(self, launcher: StepLauncher) -> None:
        """Let a launcher's steps be timed: divided by part if they run in the calling thread."""
        if isinstance(launcher, AsyncStepLauncher):
            launcher.launch = self._timed_launch(launcher.launch)  # type: ignore[method-assign]
            return
        run_model = launcher.run_model
        if isinstance(run_model, ModelRunner):
            run_model.memory = _TimedKVMemory(run_model.memory, self._clock, self._seconds)
        divided = isinstance(run_model, ModelRunner) and run_model.runs_on_numpy

        def timed(batch: Batch) -> Logits:
            forward, planned, start = self._forward, self._seconds[PLAN], self._clock()
            before = forward.attention, forward.products, forward.sample
            with forward.timing_forward():
                logits = run_model(batch)
            spent = self._clock() - start - (self._seconds[PLAN] - planned)
            if divided:
                after = forward.attention, forward.products, forward.sample
                for part, b, a in zip((ATTENTION, PRODUCTS, SAMPLE), before, after, strict=True):
                    self._seconds[part] += a - b
                    spent -= a - b
            self._seconds[REST if divided else MODEL] += spent
            return logits

        launcher.run_model = timed

    def _timed_launch(self, launch: Callable[[Batch], WaitLogits]) -> Callable[..., WaitLogits]:
        clock, seconds = self._clock, self._seconds

        def timed(batch: Batch) -> WaitLogits:
            start = clock()
            wait_logits = launch(batch)
            seconds[MODEL] += clock() - start

            def wait() -> Logits:
                start = clock()
                logits = wait_logits()
                seconds[MODEL] += clock() - start
                return logits

            return wait

        return timed

    def begin_step(self) -> None:
        """Begin a step, or the first of several: the time before its parts is outside of them."""
        self._enter_gap()

    def _enter_gap(self) -> None:
        self._edge = self._clock(), time.thread_time() if self._watches_gaps else None

    def _leave_gap(self) -> None:
        """Add the time since ``_enter_gap`` in which this thread had no CPU to ``idle``."""
        if self._edge is not None:
            began, cpu = self._edge
            gap = self._clock() - began
            self._gap_s += gap
            if cpu is not None:
                self._seconds[IDLE] += max(0.0, gap - (time.thread_time() - cpu))
            self._edge = None

    def end_step(self, wall_s: float, waited_s: float) -> None:
        """End a step that took ``wall_s`` since the previous one ended, ``waited_s`` of it idle."""
        self._leave_gap()
        self._watches_gaps, self._gap_s = self._gap_s > LONG_GAP_S, 0.0
        seconds = self._seconds
        seconds[LEFT] = wall_s - waited_s - sum(seconds)
        seconds[STALLS] = waited_s
        self._steps.setdefault(self._kind, []).append(tuple(seconds))
        seconds[:] = [0.0] * len(PARTS)

    def steps(self, kind: str) -> NDArray[np.float64]:
        """Return the seconds of each step of a kind by part, float64 [steps, parts]."""
        times = np.array(self._steps.get(kind, ())).reshape(-1, len(PARTS))
        waited, times[:, STALLS] = times[:, STALLS].copy(), 0.0
        typical = np.median(times, axis=0) if len(times) else np.zeros(len(PARTS))
        stalled = (times > STALL_RATIO * typical) & (times > typical + STALL_S)
        if kind == "prefill":
            stalled[:, ATTENTION : MODEL + 1] = False
        excess = np.where(stalled, times - typical, 0.0)
        times -= excess
        times[:, STALLS] = excess.sum(axis=1)
        times[:, IDLE] += waited
        return times

    def report(self) -> dict[str, Any]:
        """Return the note ``step_parts`` without the tokens, as JSON values."""
        times = {kind: self.steps(kind) for kind in self._steps}
        stamps_us = self._forward.nodes / max(1, sum(map(len, times.values()))) * _read_us()
        return {
            "steps": {kind: len(steps) for kind, steps in times.items()},
            "parts_us": {
                kind: {
                    part: round(float(s) * 1e6, 1)
                    for part, s in zip(PARTS, steps.sum(axis=0), strict=True)
                    if s
                }
                for kind, steps in times.items()
            },
            "clocks_us": round(_calibrate_us() + stamps_us, 3),
        }


class _TimedKVMemory:
    """Prepares a step's attention, and times it."""

    def __init__(self, memory: KVMemory, clock: Clock, seconds: list[float]) -> None:
        self.attention = memory.attention
        self._memory = memory
        self._clock, self._seconds = clock, seconds

    def prepare_step(self, batch: Batch) -> tuple[Batch, StepAttention]:
        start = self._clock()
        prepared = self._memory.prepare_step(batch)
        self._seconds[PLAN] += self._clock() - start
        return prepared


class ClockedEngine:
    """An engine whose steps are timed by part; all else is the engine's own.

    The seconds in which the client had nothing to send are those of ``wait``.
    """

    def __init__(self, engine: InferenceEngine, clocks: StepClocks, clock: Clock) -> None:
        self._engine, self._clocks, self._clock = engine, clocks, clock
        self.name = engine.name
        self.submit, self.has_work = engine.submit, engine.has_work
        self._waited_s = 0.0
        self._end: float | None = None

    def step(self) -> list[TokenEvent]:
        """Run a step of the engine; see ``InferenceEngine``."""
        start = self._clock()
        self._clocks.begin_step()
        events = self._engine.step()
        end = self._clock()
        self._clocks.end_step(end - (start if self._end is None else self._end), self._waited_s)
        self._end, self._waited_s = end, 0.0
        return events

    def waits(self, wait: Callable[[float], None]) -> Callable[[float], None]:
        """Return ``wait``, whose time counts as idle."""

        def timed(seconds: float) -> None:
            start = self._clock()
            wait(seconds)
            self._waited_s += self._clock() - start

        return timed


def _calibrate_us() -> float:
    """Return what the clocks add to a step, in us: the time of steps whose parts do nothing."""

    def nothing(*_arguments: Any) -> Any:
        return _NO_BATCH

    clocks = StepClocks()
    parts = clocks.time_parts(StepParts(nothing, nothing, nothing, nothing, nothing))
    launcher = StepLauncher(nothing)
    clocks.time_launcher(launcher)
    times = []
    for _ in range(CALIBRATION_STEPS):
        start = time.perf_counter()
        clocks.begin_step()
        parts.build(parts.draft(parts.schedule()))
        launcher.run_model(_NO_BATCH)  # type: ignore[arg-type]
        parts.update(parts.sample(None, None))  # type: ignore[arg-type]
        clocks.end_step(time.perf_counter() - start, 0.0)
        times.append(time.perf_counter() - start)
    return sorted(times)[CALIBRATION_STEPS // 2] * 1e6


def _read_us() -> float:
    start = time.perf_counter()
    for _ in range(CALIBRATION_STEPS):
        time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    return (time.perf_counter() - start) / CALIBRATION_STEPS * 1e6


class _NoBatch:
    prefill_tokens = 0


_NO_BATCH = _NoBatch()
