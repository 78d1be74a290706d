"""Drafts of records: the state of a run in progress.

A draft always holds a valid record. However the run ends, the record says how far the run got.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from labkit.experiment.worker import mlx_known_answer_test
from labkit.experiment.worker.run_failures import RunFailure, failure_of
from labkit.machine.exception_text import one_line
from labkit.records import Arm, Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from labkit.workload.workload_protocols import Measurement


@dataclass
class StageTimer:
    """Wall seconds per stage (monotonic clock), and the name of the current stage.

    Time in which the timer is paused belongs to no stage.
    """

    spawned_ns: int
    seconds: dict[str, float] = field(default_factory=dict)
    stage: str = "startup"
    paused_ns: int = 0

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of the ``with`` block to a stage, which becomes the current one."""
        self.stage = stage
        start = self._clock_ns()
        try:
            yield
        finally:
            spent = (self._clock_ns() - start) / 1e9
            self.seconds[stage] = round(self.seconds.get(stage, 0.0) + spent, 6)

    def since_spawn(self) -> float:
        """Return the seconds since the parent started this process, without pauses."""
        return round((self._clock_ns() - self.spawned_ns) / 1e9, 6)

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.paused_ns += time.monotonic_ns() - start

    def _clock_ns(self) -> int:
        return time.monotonic_ns() - self.paused_ns


@dataclass
class RunDraft:
    """The state of one run, or of the stages that the runs of one process share."""

    record: Record  # as far as it is known
    timer: StageTimer
    compiles: dict[str, int] = field(default_factory=dict)  # by numba, in each stage
    # Array outputs by digest, for reports on arms whose outputs differ.
    output_values: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    step_trace: Mapping[str, Any] | None = None

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self.timer.time(name)

    def set(self, **fields: Any) -> None:
        self.record = replace(self.record, **fields)

    def note(self, **notes: Any) -> None:
        self.set(notes={**self.record.notes, **notes})

    def count_compilation(self) -> None:
        self.compiles[self.timer.stage] = self.compiles.get(self.timer.stage, 0) + 1

    def fail(self, failure: RunFailure) -> None:
        """Mark the run as failed. If it has failed before, the first failure stays."""
        if self.record.ok:
            self.set(outcome=failure.outcome, detail=failure.detail)

    @contextmanager
    def catch_failures(self) -> Iterator[None]:
        """Turn an exception of the ``with`` block into the run's failure."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.fail(failure_of(error, self.timer.stage))
            try:
                mlx_known_answer_test.check()
            except Exception as stale:
                self.note(canary=one_line(stale))

    def add_measurement(self, measurement: Measurement, arm: Arm) -> None:
        """Add an arm's measurement; fail the run if a claim about it does not hold.

        A counter that is NaN or infinite fails the run and is left out.
        """
        counters = measurement.counters.items()
        finite = {name: float(value) for name, value in counters if math.isfinite(value)}
        self.output_values |= measurement.values
        self.step_trace = measurement.step_trace
        self.set(cases=measurement.cases, counters=finite)
        self.note(**measurement.notes)
        for failure in _broken_claims(measurement, arm, finite):
            self.fail(failure)


def _broken_claims(
    measurement: Measurement, arm: Arm, finite: Mapping[str, float]
) -> Iterator[RunFailure]:
    """Yield a failure if no case was measured, a counter is not finite or a claim does not hold."""
    for name, value in measurement.counters.items():
        if name not in finite:
            yield RunFailure("invalid_output", f"counter {name} is {float(value)}")
    for case in measurement.cases if arm.all_served else ():
        if unserved := case.notes.get("traffic", {}).get("unserved"):
            request = unserved[0]
            yield RunFailure(
                "invalid_output",
                f"request {request['id']} {request['outcome']}: {request['error']}; "
                "the ablation claims that all requests are served (claims.all_served)",
            )
    if measurement.cases and all(case.skipped is not None for case in measurement.cases):
        # Its claimed counters are missing for this reason, which is the one to name.
        detail = f"no case was measured; {measurement.cases[0].skipped}"
        yield RunFailure("invalid_output", detail)
    for name in dict.fromkeys(filter(None, [arm.engine_counter, *arm.engaged])):
        if not finite.get(name, 0) > 0:
            state = "stayed 0" if name in finite else "is missing"
            yield RunFailure("vacuous", f"the claimed counter {name} {state}")
