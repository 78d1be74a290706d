"""Serving capacity: the highest rate at which an arm keeps its requests within limits.

Capacity is the highest rate at which a share of requests, ``workload.capacity``, stays within
``workload.limits``. Every run of an arm counts its requests and those within the limits; refused
and failed requests are outside, and so are all requests of a run that failed or that sent requests
more slowly than they arrived. With several arms, alpha is divided among them. An arm whose count of
tokens is unusable has no capacity within a limit on TPOT, and no arm has one while nothing may be
claimed of one of its cells, or if swap grew, the client was often late or the host changed in one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.served_requests import (
    REQUESTS_PER_S,
    has_tpot_limit,
    rate_unit,
    sustained,
    tpot_cause,
)
from labkit.analysis.comparison.validity_gates import machine_failures
from labkit.analysis.number_format import significant_text
from labkit.analysis.statistics.load_capacity import Capacity, LoadCounts, load_capacity
from labkit.analysis.studies.load_curves import load_of, shared_unit, unequal_requests
from labkit.records.measurement_notes import TrafficNote

if TYPE_CHECKING:
    from labkit.analysis.studies.cell_summary import CellSummary

LIMITS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


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
        estimate = (
            f"; estimated capacity {significant_text(about, 3)} {self.unit}"
            if about is not None
            else ""
        )
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
            yield CapacityLoad(
                arm.name,
                rest,
                workload["capacity"] / 100,
                _limits(workload["limits"]),
                data.design.alpha / len(arms),
                counts,
                all(map(sustained, _notes(analysis, arm.name))),
                data.withheld_reason
                or doubt
                or (tpot_cause(arm.name, data.records) if has_tpot_limit(arm) else None),
                rate_unit(arm.name, data.records),
            )


def serving_capacities(
    cells: Sequence[CellSummary], labels: Sequence[str]
) -> list[ServingCapacity]:
    """Return the capacity of every arm, for each workload that sets ``workload.capacity``.

    ``cells``: cells of one machine. ``labels``: their labels without ``LOAD_OPTIONS``.
    """
    groups: dict[tuple[str, str], list[CapacityLoad]] = {}
    suffixes: dict[tuple[str, str], str] = {}
    for cell, label in zip(cells, labels, strict=True):
        for one in cell.capacities:
            key = (one.rest, one.arm)
            suffixes[key] = f", {label}"
            groups.setdefault(key, []).append(one)
    several = Counter(arm for _, arm in groups)
    return [
        _capacity(loads, suffixes[key] if several[key[1]] > 1 else "")
        for key, loads in groups.items()
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
