"""An arm under increasing load: its latency against its throughput, and its serving capacity.

A load curve joins cells that differ in their load alone (a rate or a number of clients). Its knee
is the load with the greatest power, which is throughput over latency (L. Kleinrock, "Power and
deterministic rules of thumb for probabilistic problems in computer communications", ICC 1979).
Below the knee, the engine could serve more requests at hardly any extra latency; above it, latency
grows faster than throughput. Throughput is in requests per second, and latency is the median time
to the last token.

Capacity is the highest rate at which a share of requests, ``workload.capacity``, stays within
``workload.limits``. Every run of an arm counts its requests and those within the limits; refused
and failed requests are outside, and so are all requests of a run that failed or that sent requests
more slowly than they arrived. With several arms, alpha is divided among them. An arm whose count of
tokens is unusable has no capacity within a limit on TPOT, and no arm has one while nothing may be
claimed of one of its cells, or if swap grew, the client was often late or the host changed in one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.request_comparability import (
    REQUESTS_PER_S,
    has_tpot_limit,
    rate_unit,
    sustained,
    tpot_cause,
)
from labkit.analysis.comparison.validity_gates import machine_failures
from labkit.analysis.number_format import significant_text
from labkit.analysis.statistics.load_capacity import Capacity, LoadCounts, load_capacity
from labkit.records.record_notes_schema import TrafficNote

if TYPE_CHECKING:
    from labkit.analysis.studies.cell_summary import CellSummary

LOAD_OPTIONS = ("workload.concurrency", "workload.arrivals.rate")
SESSIONS_PER_S = "sessions/s"
MIN_LOADS = 3  # a curve needs this many different loads
METRICS = ("request_s", "total_tok_s", "ttft_p50_ms", "e2e_p50_ms", "e2e_p99_ms")
LIMITS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


@dataclass(frozen=True)
class LoadPoint:
    """One load of a curve: its size (a rate or a number of clients), and the medians by metric.

    ``requests``: those of a run, if a pilot found their number; None: all.
    """

    size: float
    medians: Mapping[str, float]
    requests: int | None = None

    @property
    def power(self) -> float:
        """Throughput over latency: requests per second, divided by the median E2E in seconds."""
        return self.medians["request_s"] / (self.medians["e2e_p50_ms"] / 1e3)


@dataclass(frozen=True)
class ArmLoad:
    """An arm of one cell under a load. ``rest`` is equal in cells that differ only in their load.

    ``by``: the unit of load, ``requests/s``, ``sessions/s`` or ``clients``.
    """

    arm: str
    rest: str
    by: str
    load: LoadPoint


@dataclass(frozen=True)
class LoadCurve:
    """An arm under increasing load.

    ``name``: the arm's name, with the options in which its cells differ from those of another curve
    of the arm. ``by``: the unit of load, ``requests/s``, ``sessions/s`` or ``clients``.
    """

    arm: str
    name: str
    by: str
    loads: tuple[LoadPoint, ...]

    @property
    def knee(self) -> LoadPoint | None:
        """The load with the greatest power, or None if it is the largest load that was measured."""
        best = max(self.loads, key=lambda load: load.power)
        return None if best is self.loads[-1] else best


def arm_loads(analysis: CellAnalysis) -> Iterator[ArmLoad]:
    """Yield the arms of a cell that have all metrics of a load curve."""
    medians, records = _medians(analysis), analysis.data.records
    for arm in analysis.data.arms:
        load, rest = load_of(arm.config)
        if load is not None and arm.role != "control" and arm.name in medians:
            point = LoadPoint(load[1], medians[arm.name], analysis.data.design.units)
            by = rate_unit(arm.name, records) if load[0] == REQUESTS_PER_S else load[0]
            yield ArmLoad(arm.name, rest, by, point)


@dataclass(frozen=True)
class ServingCapacity:
    """An arm's capacity, its loads by rate, the target share (0 to 1) and the limits in words.

    ``suffix``: a comma and the options in which the arm's cells differ from those of another
    capacity of the arm; or empty. ``unit``: that of the rates, ``requests/s`` or ``sessions/s``.
    ``unsustained``: the rates at which a run's requests were sent more slowly than they arrived.
    ``cause``: the reason why the arm has no capacity, or None.
    """

    arm: str
    target: float
    limits: str
    alpha: float
    loads: tuple[LoadCounts, ...]
    capacity: Capacity
    unsustained: tuple[float, ...] = ()
    cause: str | None = None
    unit: str = REQUESTS_PER_S
    suffix: str = ""

    @property
    def name(self) -> str:
        """The arm's name with the suffix."""
        return f"{self.arm}{self.suffix}"

    @property
    def sentence(self) -> str:
        """The capacity in a sentence, and the loads that were not sustained in another."""
        if self.cause is not None:
            return f"Not decided: the capacity of {self.name} within {self.limits}: {self.cause}."
        rates = ", ".join(f"{rate:g}" for rate in self.unsustained)
        not_sustained = f" Not sustained: the load at {rates} {self.unit}." if rates else ""
        numbers = [int(load.requests.max()) for load in self.loads]
        return f"{self._answer}{not_sustained} {unequal_requests(numbers)}".rstrip()

    @property
    def _answer(self) -> str:
        low, high, about = self.capacity.at_least, self.capacity.below, self.capacity.estimate
        kept = f"{100 * self.target:g} % of requests within {self.limits}"
        confidence = f"({100 * (1 - self.alpha):.4g} % confidence)"
        if low is None and high is None:
            return f"Not decided: at which of these rates {self.name} keeps {kept} {confidence}."
        if low is None:
            return f"{self.name} does not keep {kept} at {high:g} {self.unit} {confidence}."
        refuted = f", but not at {high:g}" if high is not None else ""
        estimate = ""
        if about is not None:
            estimate = f"; estimated capacity {significant_text(about, 3)} {self.unit}"
        return f"{self.name} keeps {kept} at {low:g} {self.unit}{refuted} {confidence}{estimate}."


@dataclass(frozen=True)
class CapacityLoad:
    """An arm of one cell whose workload sets ``workload.capacity``: what its capacity is made of.

    ``rest``: as in :class:`.ArmLoad`. ``alpha``: the arm's share of the cell's. ``unit``: that of
    the rate.
    """

    arm: str
    rest: str
    target: float
    limits: str
    alpha: float
    counts: LoadCounts
    is_sustained: bool
    cause: str | None
    unit: str


def capacity_loads(analysis: CellAnalysis) -> Iterator[CapacityLoad]:
    """Yield the arms of a cell that count towards a capacity."""
    data = analysis.data
    arms = [arm for arm in data.arms if arm.role != "control"]
    failures = machine_failures(data.records, data.design.across_hosts)
    doubt = next((cause for _, cause in failures), None)
    for arm in arms:
        workload = arm.config.get("workload", {})
        if workload.get("capacity") is None:
            continue
        load, rest = load_of(arm.config)
        counts = None if load is None else _counts(analysis, arm.name, load[1])
        if counts is not None:
            tpot = tpot_cause(arm.name, data.records) if has_tpot_limit(arm) else None
            yield CapacityLoad(
                arm.name,
                rest,
                target=workload["capacity"] / 100,
                limits=_limits(workload["limits"]),
                alpha=data.design.alpha / len(arms),
                counts=counts,
                is_sustained=all(map(sustained, _notes(analysis, arm.name))),
                cause=data.withheld_reason or doubt or tpot,
                unit=rate_unit(arm.name, data.records),
            )


OneLoad = TypeVar("OneLoad", ArmLoad, CapacityLoad)


def _grouped(
    cells: Sequence[CellSummary],
    labels: Sequence[str],
    loads: Callable[[CellSummary], Sequence[OneLoad]],
) -> dict[tuple[str, str], tuple[str, list[OneLoad]]]:
    """Return the loads of each arm in cells that differ in their load alone, and a cell's label.

    The keys are (rest, arm): an arm with a rate has another rest than one with clients.
    """
    groups: dict[tuple[str, str], list[OneLoad]] = {}
    last: dict[tuple[str, str], str] = {}
    for cell, label in zip(cells, labels, strict=True):
        for one in loads(cell):
            key = one.rest, one.arm
            last[key] = label
            groups.setdefault(key, []).append(one)
    return {key: (last[key], own) for key, own in groups.items()}


def load_curves(cells: Sequence[CellSummary], labels: Sequence[str]) -> list[LoadCurve]:
    """Return a study's load curves: cells that differ in their load alone are one curve per arm.

    ``labels``: the cells' labels without ``LOAD_OPTIONS``.
    """
    groups = _grouped(cells, labels, lambda cell: cell.loads)
    long = {k: v for k, v in groups.items() if len({o.load.size for o in v[1]}) >= MIN_LOADS}
    several, curves = Counter(arm for _, arm in long), []
    for (_, arm), (label, own) in long.items():
        name = f"{arm}, {label}" if several[arm] > 1 else arm
        loads = sorted((one.load for one in own), key=lambda load: load.size)
        unit = shared_unit([one.by for one in own])
        curves.append(LoadCurve(arm, name, unit, tuple(loads)))
    return curves


def serving_capacities(
    cells: Sequence[CellSummary], labels: Sequence[str]
) -> list[ServingCapacity]:
    """Return the capacity of every arm, for each workload that sets ``workload.capacity``.

    ``cells``: cells of one machine. ``labels``: their labels without ``LOAD_OPTIONS``.
    """
    groups = _grouped(cells, labels, lambda cell: cell.capacities)
    several = Counter(arm for _, arm in groups)
    return [
        _capacity(loads, f", {label}" if several[arm] > 1 else "")
        for (_, arm), (label, loads) in groups.items()
    ]


def _capacity(cells: Sequence[CapacityLoad], suffix: str) -> ServingCapacity:
    alpha, last = min(one.alpha for one in cells), cells[-1]
    by_rate = sorted(cells, key=lambda one: one.counts.rate)
    loads = tuple(one.counts for one in by_rate)
    unsustained = tuple(one.counts.rate for one in by_rate if not one.is_sustained)
    cause = next(filter(None, (one.cause for one in cells)), None)
    capacity = Capacity(None, None, None) if cause else load_capacity(loads, last.target, alpha)
    unit = shared_unit([one.unit for one in cells])
    return ServingCapacity(
        last.arm, last.target, last.limits, alpha, loads, capacity, unsustained, cause, unit, suffix
    )


def _notes(analysis: CellAnalysis, arm: str) -> list[TrafficNote]:
    """Return the notes on requests of an arm's successful runs that counted those in the limits.

    By the times that verdicts are about: with stalls where these stay in all times.
    """
    return [
        case.known_notes["traffic"]
        for record in analysis.data.judged_records
        if record.ok and record.arm == arm
        for case in record.cases
        if "good" in case.known_notes.get("traffic", {})
    ]


def rate_is_decided(analysis: CellAnalysis) -> bool | None:
    """Return whether every arm is shown to keep its target share at the cell's rate, or to miss it.

    None if the cell's workload has no such target.
    """
    arms = [arm for arm in analysis.data.arms if arm.role != "control"]
    alpha, decided = analysis.data.design.alpha / len(arms), list[bool]()
    for arm in arms:
        target = arm.config.get("workload", {}).get("capacity")
        load, _ = load_of(arm.config)
        if target is None or load is None:
            return None
        counts = _counts(analysis, arm.name, load[1])
        decided.append(counts is not None and counts.is_decided(target / 100, alpha))
    return all(decided)


def _counts(analysis: CellAnalysis, arm: str, rate: float) -> LoadCounts | None:
    """Return each run's requests, and those within the limits; None if no run counted them."""
    data, records = analysis.data, analysis.data.records
    notes, spent = _notes(analysis, arm), data.criteria.alpha / data.design.alpha
    if not notes:
        return None
    good = [float(note["good"]) if sustained(note) else 0.0 for note in notes]
    requests = [float(note["requests"]) for note in notes]
    failed = sum(record.arm == arm and not record.ok for record in records)
    good, requests = good + [0.0] * failed, requests + [max(requests)] * failed
    return LoadCounts(rate, np.array(good), np.array(requests), spent)


def _limits(limits: dict[str, float | None]) -> str:
    """Return the limits in words: ``TTFT 500 ms and TPOT 50 ms``."""
    known = [f"{name} {limits[key]:g} ms" for key, name in LIMITS.items() if limits.get(key)]
    return " and ".join(known)


def shared_unit(units: Sequence[str]) -> str:
    """Return the unit of the loads of cells that differ in their load alone.

    A run so short that it has one request of each session notes ``requests/s``, although sessions
    arrive at its rate as they do in a longer run.
    """
    return SESSIONS_PER_S if SESSIONS_PER_S in units else units[0]


def unequal_requests(numbers: Sequence[int | None]) -> str:
    """Return a note if loads differ in their requests of a run (None: all), or an empty text."""
    if len(set(numbers)) < 2:
        return ""
    each = ", ".join("all" if number is None else f"{number}" for number in numbers)
    return (
        f"The loads differ in their requests as well: a run had {each} (in the order of the "
        "loads). With workload.num_requests=N all have the same."
    )


def _medians(analysis: CellAnalysis) -> dict[str, dict[str, float]]:
    """Return the medians by arm and metric, for the arms that have all of ``METRICS``."""
    medians_by_arm: dict[str, dict[str, float]] = {}
    for row in analysis.cell.rows:
        if row.case == "all" and row.metric in METRICS:
            for arm, values in row.arms.items():
                if values.median is not None and values.median > 0:
                    medians_by_arm.setdefault(arm, {})[row.metric] = values.median
    return {arm: medians for arm, medians in medians_by_arm.items() if len(medians) == len(METRICS)}


def load_of(config: Mapping[str, Any]) -> tuple[tuple[str, float] | None, str]:
    """Return an arm's load and a digest of the rest of its config.

    The load is (unit, size), or None if the config sets no rate and no number of clients. The unit
    is ``requests/s`` for any rate: the config does not tell whether it is one of sessions. Arms
    with the same digest differ only in their load.
    """
    workload = dict(config.get("workload", {}))
    arrivals = dict(workload.pop("arrivals", {}))
    rate, clients = arrivals.pop("rate", None), workload.pop("concurrency", None)
    load = (REQUESTS_PER_S, float(rate)) if rate else ("clients", float(clients or 0))
    unchanged_clients = {"clients": clients} if rate else {}
    rest = {**config, "workload": workload, "arrivals": arrivals, **unchanged_clients}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return (load if load[1] else None), digest
