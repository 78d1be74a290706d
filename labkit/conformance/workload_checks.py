"""The contract of kinds of workload."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from labkit import workload
from labkit.config import Experiment, is_class_path
from labkit.conformance.contract import Check, Compose, demand
from labkit.workload.measurement import Estimate, Measurement


def workload_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the workload ``path``: ``package.module:Class`` or a built-in name."""
    composed: list[Experiment] = []

    def load() -> None:
        own = {"workload.kind": path} if is_class_path(path) else {"workload": path}
        composed.append(compose(own))
        workload.check(composed[0])

    yield Check("it can be created, and check() accepts its settings", load, needed=True)
    (experiment,) = composed
    yield Check("estimate() returns seconds and bytes", partial(_check_estimate, experiment))
    yield Check("apart() returns a reason or None", partial(_check_apart, experiment))
    yield Check("prepare() runs", partial(workload.prepare, experiment), needed=True)
    measured: list[Measurement] = []

    def measure() -> None:
        measured.append(workload.measure(experiment))
        _require_measured(measured[0])

    yield Check("a run has finite measurements", measure, needed=True)

    def again() -> None:
        outputs = [_outputs(one) for one in (measured[0], workload.measure(experiment))]
        demand(outputs[0] == outputs[1], "a second run with the same seed has other outputs")

    yield Check("the same seed gives the same outputs", again)


def _check_estimate(experiment: Experiment) -> None:
    estimate = workload.estimate(experiment)
    demand(isinstance(estimate, Estimate), f"it returned {type(estimate).__name__}")
    numbers = (estimate.seconds, estimate.bytes)
    demand(
        all(math.isfinite(n) and n >= 0 for n in numbers),
        f"seconds and bytes are {numbers}; both must be finite and 0 or more",
    )


def _check_apart(experiment: Experiment) -> None:
    reason = workload.apart([experiment, experiment])
    demand(
        reason is None or (isinstance(reason, str) and "\n" not in reason),
        f"it returned {reason!r}; it must be None or one line",
    )


def _require_measured(measurement: Measurement) -> None:
    demand(bool(measurement.cases), "it has no cases")
    for case in measurement.cases:
        if case.skipped is not None:
            continue
        primary = [metric for metric in case.metrics if metric.primary]
        demand(bool(primary), f"case {case.case} has no primary metric")
        for metric in primary:
            demand(
                bool(metric.repeats) and all(map(math.isfinite, metric.repeats)),
                f"case {case.case}: {metric.name} is not finite: {list(metric.repeats)[:3]}",
            )


def _outputs(measurement: Measurement) -> list[Any]:
    return [(case.case, case.outputs) for case in measurement.cases]
