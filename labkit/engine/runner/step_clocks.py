"""Clocks on the parts of engine steps: where the time of steps goes.

Clocks replace the parts of the engine's loop by functions that time them. Without clocks no code of
this module runs. The parts of a step:

    schedule    the scheduler's choice, without drafting
    draft       drafting
    build       packed arrays, and padding rows of pure decodes
    plan        block tables and maps for attention (``KVCache.prepare_step``)
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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.runtime.forward_clock import ForwardClock
from labkit.engine.engine_protocol import InferenceEngine, TokenEvent
from labkit.engine.runner.model_runner import ModelRunner
from labkit.engine.runner.step_launchers import AsyncStepLauncher, StepLauncher
from labkit.engine.step_loop import StepParts

if TYPE_CHECKING:
    from labkit.engine.batch import Batch
    from labkit.engine.sampling.step_logits import Logits, WaitLogits

Clock = Callable[[], float]
PARTS = (
    "schedule", "draft", "build", "plan", "attention", "products", "rest", "model", "sample",
    "update", "idle", "left_over", "stalls",
)  # fmt: skip
(
    SCHEDULE, DRAFT, BUILD, PLAN, ATTENTION, PRODUCTS, REST, MODEL, SAMPLE, UPDATE, IDLE, LEFT,
    STALLS,
) = range(len(PARTS))  # fmt: skip
STALL_RATIO, STALL_S, LONG_GAP_S = 3.0, 0.001, 0.0001
CALIBRATION_STEPS = 64


class StepClocks:
    """The times of an engine's steps by part. ``clock`` returns seconds.

    ``begin_step`` is called before each step, and ``end_step`` after it.
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

    def _timed(self, part: int, call: Callable[..., Any], within: int | None = None) -> Any:
        """Return ``call``, whose time counts for ``part`` and not for the part ``within``."""
        clock, seconds = self._clock, self._seconds

        def timed(*arguments: Any) -> Any:
            start = clock()
            result = call(*arguments)
            spent = clock() - start
            seconds[part] += spent
            if within is not None:
                seconds[within] -= spent
            return result

        return timed

    def time_parts(self, parts: StepParts) -> StepParts:
        scheduled, built = self._timed(SCHEDULE, parts.schedule), self._timed(BUILD, parts.build)
        updated = self._timed(UPDATE, parts.update)

        def schedule() -> Any:
            self._leave_gap()
            return scheduled()

        def build(scheduled: Any) -> Any:
            batch = built(scheduled)
            self._kind = "prefill" if batch.prefill_tokens else "decode"
            return batch

        def update(results: Any) -> Any:
            events = updated(results)
            self._enter_gap()
            return events

        draft = self._timed(DRAFT, parts.draft, within=SCHEDULE)  # ``schedule`` calls ``draft``
        return StepParts(schedule, draft, build, self._timed(SAMPLE, parts.sample), update)

    def time_launcher(self, launcher: StepLauncher) -> None:
        """Let a launcher's steps be timed: divided by part if they run in the calling thread."""
        if isinstance(launcher, AsyncStepLauncher):
            launch = self._timed(MODEL, launcher.launch)

            def timed_launch(batch: Batch) -> WaitLogits:
                wait: WaitLogits = self._timed(MODEL, launch(batch))
                return wait

            launcher.launch = timed_launch  # type: ignore[method-assign]
            return
        run_model, whole = launcher.run_model, MODEL
        if isinstance(run_model, ModelRunner):
            memory, whole = run_model.memory, REST if run_model.runs_on_numpy else MODEL
            prepare = self._timed(PLAN, memory.prepare_step, within=whole)
            run_model.memory = memory._replace(prepare_step=prepare)
        timed_model = self._timed(whole, run_model)

        def timed(batch: Batch) -> Logits:
            forward, seconds = self._forward, self._seconds
            before = forward.attention, forward.products, forward.sample
            with forward.timing_forward():
                logits: Logits = timed_model(batch)
            after = forward.attention, forward.products, forward.sample
            for part, b, a in zip((ATTENTION, PRODUCTS, SAMPLE), before, after, strict=True):
                seconds[part] += a - b
                seconds[whole] -= a - b
            return logits

        launcher.run_model = timed

    def begin_step(self) -> None:
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
        times = np.array(self._steps[kind])
        waited, times[:, STALLS] = times[:, STALLS].copy(), 0.0
        typical = np.median(times, axis=0)
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
        parts_us = {
            kind: {p: round(float(s) * 1e6, 1) for p, s in zip(PARTS, sums, strict=True) if s}
            for kind, sums in ((kind, steps.sum(axis=0)) for kind, steps in times.items())
        }
        nodes = self._forward.nodes / max(1, sum(map(len, times.values())))
        return {
            "steps": {kind: len(steps) for kind, steps in times.items()},
            "parts_us": parts_us,
            "clocks_us": round(clocks_us(nodes), 3),
        }


class ClockedEngine:
    """An engine whose steps are timed by part, for a client that waits with ``wait``."""

    def __init__(
        self,
        engine: InferenceEngine,
        clocks: StepClocks,
        clock: Clock,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine, self._clocks, self._clock, self._wait = engine, clocks, clock, wait
        self.submit, self.has_work = engine.submit, engine.has_work
        self._waited_s = 0.0
        self._end: float | None = None

    def step(self) -> list[TokenEvent]:
        start = self._clock() if self._end is None else self._end
        self._clocks.begin_step()
        events = self._engine.step()
        self._end = self._clock()
        self._clocks.end_step(self._end - start, self._waited_s)
        self._waited_s = 0.0
        return events

    def wait(self, seconds: float) -> None:
        start = self._clock()
        self._wait(seconds)
        self._waited_s += self._clock() - start


def clocks_us(nodes: float) -> float:
    """Return what the clocks add to a step, in us: measured on steps whose parts do nothing.

    ``nodes``: the timed nodes of a captured graph in a step.
    """
    batch = SimpleNamespace(prefill_tokens=0)
    clocks, launcher = StepClocks(), StepLauncher(lambda _batch: None)  # type: ignore[arg-type,return-value]
    parts: Any = clocks.time_parts(StepParts(*[lambda *_: batch] * 5))  # type: ignore[arg-type]
    clocks.time_launcher(launcher)
    times = []
    for _ in range(CALIBRATION_STEPS):
        start = time.perf_counter()
        clocks.begin_step()
        parts.build(parts.draft(parts.schedule()))
        launcher.run_model(batch)  # type: ignore[arg-type]
        parts.update(parts.sample(None, None))
        for _ in range(round(nodes)):
            time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        clocks.end_step(time.perf_counter() - start, 0.0)
        times.append(time.perf_counter() - start)
    return sorted(times)[CALIBRATION_STEPS // 2] * 1e6
