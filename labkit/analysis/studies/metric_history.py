"""The history of a metric over the studies in a folder, from their records alone.

A series is one arm in one row of a cell's results on one kind of machine, with a point per study:
the median over the study's processes. Points of studies in which a gate failed for the arm are left
out. Arms that differ in an option belong to different series, unless some of the studies lack the
option. Change points are tested per series, with one value per study. All series that are long
enough share alpha. The machine itself changes from day to day. So each change is reported with the
change of the machine probe, which times fixed kernels and no arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.observations import MEASURED_OUTCOMES, probe_values, run_value
from labkit.analysis.statistics.change_points import change_points, fewest_values
from labkit.analysis.studies.data_frames import config_options
from labkit.analysis.studies.study_discovery import cell_dirs, listed_studies
from labkit.config.option_index import did_you_mean
from labkit.records import MACHINE_FIELDS, Record, RecordError, StudyPath, open_study

ALPHA = 0.05  # shared by all series of a page
CLEAN = "clean"


@dataclass(frozen=True)
class HistoryPoint:
    """One study in a series."""

    study: Path  # the study's folder or archive
    started: str  # when the arm's first run started, UTC, as in records
    # The commit that ran, with ``+`` if there were uncommitted changes; empty if unknown.
    commit: str
    # value, low, high: median and quartiles over the study's processes, in the metric's unit.
    value: float
    low: float
    high: float
    runs: int  # number of processes
    probe_us: float | None  # median time of the machine's probe; None if there is none
    cause: str | None = None  # why a gate that failed forbids a verdict on the arm


@dataclass(frozen=True)
class SeriesChange:
    """A change of a series' level between points ``index - 1`` and ``index``.

    ``before`` and ``after`` are the medians of the segments around the change, in the metric's
    unit. ``probe_percent`` is the change of the machine's probe in percent, or None if there is no
    probe.
    """

    index: int
    p: float
    before: float
    after: float
    probe_percent: float | None

    @property
    def percent(self) -> float | None:
        """The change of the median in percent; None from 0, and from or to a value below 0."""
        if self.after == self.before:
            return 0.0
        return 100 * (self.after / self.before - 1) if self.before > 0 <= self.after else None


@dataclass(frozen=True)
class Series:
    """One arm in one row over time. ``label`` names the option values that set the series apart."""

    metric: str
    cell: str
    case: str
    arm: str
    label: str
    machine: str
    unit: str
    better: str
    points: tuple[HistoryPoint, ...]  # of the studies whose gates hold
    changes: tuple[SeriesChange, ...] = ()
    is_tested: bool = False  # whether it is long enough for a change to be found
    left_out: tuple[HistoryPoint, ...] = ()  # those with a cause

    @property
    def name(self) -> str:
        """The series in words: arm, case, cell and ``label``."""
        case = "" if self.case == "all" else f", {self.case}"
        return f"{self.arm}{case} ({self.cell}{self.label})"


@dataclass(frozen=True)
class _Sample:
    """One point, with the facts that select its series."""

    key: tuple[str, str, str, str, str, str]  # cell, case, arm, machine, unit, better
    options: Mapping[str, Any]
    point: HistoryPoint


def metric_history(root: Path, metric: str) -> list[Series]:
    """Return the series of a metric over all studies in a folder, the longest first.

    Raises ``RecordError`` if a record is not valid or was edited, or no study has the metric.
    """
    samples: list[_Sample] = []
    known: set[str] = set()
    for study in listed_studies(root):
        for cell in cell_dirs(open_study(study)):
            samples += _samples(study, cell, metric, known)
    if not samples:
        hint = did_you_mean(metric, sorted(known)) or (
            f"; the metrics are: {', '.join(sorted(known))}" if known else ""
        )
        raise RecordError(f"{root}: no study has the metric {metric!r}{hint}")
    groups: dict[tuple[str, ...], list[_Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.key, []).append(sample)
    series = [one for group in groups.values() for one in _series(metric, group)]
    series.sort(key=lambda one: (-len(one.points), one.name, one.machine))
    tested = _num_tested([len(one.points) for one in series])
    changed = (_with_changes(one, ALPHA / tested) for one in series[:tested])
    return [*changed, *series[tested:]]


def _num_tested(lengths: Sequence[int]) -> int:
    """Return how many of the longest series (``lengths``) can all find a change together."""
    return max((n for n, k in enumerate(lengths, 1) if k >= fewest_values(ALPHA / n)), default=0)


def _samples(study: Path, cell: StudyPath, metric: str, known: set[str]) -> Iterator[_Sample]:
    """Yield a sample per arm and case of a cell that has the metric."""
    analysis = analyse(cell)
    data = analysis.data
    records = [r for r in data.judged_records if r.outcome in MEASURED_OUTCOMES]
    probes = probe_values(records)
    for arm in data.arms:
        own = [r for r in records if r.arm == arm.name and arm.role != "control"]
        options = dict(config_options(arm.config))
        cause = next(iter(analysis.causes(arm.name)), None)
        for (case, unit, better), values in _values(own, metric, known).items():
            machine = _machine(own[0].environment)
            key = (cell.name, case, arm.name, machine, unit, better)
            yield _Sample(key, options, _point(study, own, values, probes, cause))


def _values(
    records: Sequence[Record], metric: str, known: set[str]
) -> dict[tuple[str, str, str], list[float]]:
    """Return processes' values by (case, unit, direction); add the metrics to ``known``."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        for case in record.cases:
            known.update(m.name for m in case.metrics)
            for m in (m for m in case.metrics if m.name == metric):
                values.setdefault((case.case, m.unit, m.better), []).append(run_value(m.repeats))
    return values


def _point(
    study: Path,
    records: Sequence[Record],
    values: Sequence[float],
    probes: Mapping[tuple[int, int], float],
    cause: str | None,
) -> HistoryPoint:
    first = min(records, key=lambda record: record.started)
    commit = str(first.environment.get("git") or "")[:10]
    changed = first.environment.get("git_changes") not in (None, CLEAN)
    low, high = np.quantile(values, (0.25, 0.75))
    own = [p for r in records if (p := probes.get((r.block, r.position))) is not None]
    probe = math.exp(median(own)) if own else None
    commit += "+" if commit and changed else ""
    numbers = float(median(values)), float(low), float(high)
    return HistoryPoint(study, first.started, commit, *numbers, len(values), probe, cause)


def _machine(environment: Mapping[str, Any]) -> str:
    """Return a description that is equal on machines of the same kind."""
    facts = {name: environment.get(name) for name in MACHINE_FIELDS}
    memory, cores = facts.pop("memory_bytes"), facts.pop("cores")
    sizes = (cores and f"{cores} cores", memory and f"{memory / 2**30:.0f} GiB")
    return ", ".join(str(fact) for fact in (*facts.values(), *sizes) if fact) or "unknown machine"


def _series(metric: str, group: Sequence[_Sample]) -> Iterator[Series]:
    """Yield a group's series: samples that agree in all the options that all of them have."""
    shared = set.intersection(*(set(sample.options) for sample in group))
    varying = sorted(
        name for name in shared if len({repr(sample.options[name]) for sample in group}) > 1
    )
    parts: dict[tuple[str, ...], list[HistoryPoint]] = {}
    for sample in group:
        values = tuple(f"{name}={sample.options[name]}" for name in varying)
        parts.setdefault(values, []).append(sample.point)
    cell, case, arm, machine, unit, better = group[0].key
    for values, points in parts.items():
        label = "".join(f", {value}" for value in values)
        # If a study and its archive are both in the folder, they count once.
        once = {(point.started, point.value, point.runs): point for point in reversed(points)}
        ordered = sorted(once.values(), key=lambda point: (point.started, point.commit))
        valid = tuple(point for point in ordered if point.cause is None)
        invalid = tuple(point for point in ordered if point.cause is not None)
        facts = metric, cell, case, arm, label, machine, unit, better
        yield Series(*facts, valid, left_out=invalid)


def _with_changes(series: Series, alpha: float) -> Series:
    values = np.array([point.value for point in series.points])
    found = change_points(np.log(values) if min(values) > 0 else values, alpha)
    bounds = [0, *(change.index for change in found), len(values)]
    probes = [point.probe_us for point in series.points]
    changes = []
    for change, start, end in zip(found, bounds, bounds[2:], strict=False):
        before, after = slice(start, change.index), slice(change.index, end)
        medians = float(median(values[before])), float(median(values[after]))
        percent = _percent(probes[before], probes[after])
        changes.append(SeriesChange(change.index, change.p, *medians, percent))
    return replace(series, changes=tuple(changes), is_tested=True)


def _percent(before: Sequence[float | None], after: Sequence[float | None]) -> float | None:
    """Return the change of the probe's median in percent, or None if any value is None or 0."""
    known = [[value for value in part if value] for part in (before, after)]
    if not all(known) or [*map(len, known)] != [len(before), len(after)]:
        return None
    return 100 * (median(known[1]) / median(known[0]) - 1)
