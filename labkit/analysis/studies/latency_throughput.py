"""Latency against throughput of a study's arms, over a sweep of rates or clients.

The knee of a curve is the load with the greatest power, which is throughput over latency
(L. Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer
communications", ICC 1979). Below the knee, the engine could serve more requests at hardly any extra
latency; above it, latency grows faster than throughput. Throughput is in requests per second, and
latency is the median time to the last token.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.studies.study_analysis import cell_labels

LOAD_OPTIONS = ("workload.concurrency", "workload.arrivals.rate")
MIN_LOADS = 3  # a curve needs this many different loads
METRICS = ("request_s", "total_tok_s", "ttft_p50_ms", "e2e_p50_ms", "e2e_p99_ms")


@dataclass(frozen=True)
class LoadPoint:
    """One load of a curve: its size (a rate or a number of clients), and the medians by metric."""

    size: float
    medians: Mapping[str, float]

    @property
    def power(self) -> float:
        """Throughput over latency: requests per second, divided by the median E2E in seconds."""
        return self.medians["request_s"] / (self.medians["e2e_p50_ms"] / 1e3)


@dataclass(frozen=True)
class LoadCurve:
    """An arm under increasing load.

    ``name``: the arm's name, with the options in which its cells differ from those of another curve
    of the arm. ``by``: the unit of load, ``requests/s`` or ``clients``.
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


def load_curves(analyses: Sequence[CellAnalysis]) -> list[LoadCurve]:
    """Return a study's load curves: cells that differ in their load alone are one curve per arm."""
    points: dict[tuple[str, str, str], list[LoadPoint]] = {}
    names: dict[tuple[str, str, str], str] = {}
    for analysis, label in zip(analyses, cell_labels(analyses, ignore=LOAD_OPTIONS), strict=True):
        medians = _medians(analysis)
        for arm in analysis.data.arms:
            load, rest = load_of(arm.config)
            if load is not None and arm.role != "control" and arm.name in medians:
                by, size = load
                key = (rest, arm.name, by)
                names[key] = f"{arm.name}, {label}"
                points.setdefault(key, []).append(LoadPoint(size, medians[arm.name]))
    curves = {
        key: tuple(sorted(loads, key=lambda load: load.size))
        for key, loads in points.items()
        if len({load.size for load in loads}) >= MIN_LOADS
    }
    several = Counter(arm for _, arm, _ in curves)
    return [
        LoadCurve(arm, names[rest, arm, by] if several[arm] > 1 else arm, by, loads)
        for (rest, arm, by), loads in curves.items()
    ]


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
    """Return an arm's load and the rest of its config as JSON.

    The load is (unit, size), or None if the config sets no rate and no number of clients. Arms with
    the same rest differ only in their load.
    """
    workload = dict(config.get("workload", {}))
    arrivals = dict(workload.pop("arrivals", {}))
    rate, clients = arrivals.pop("rate", None), workload.pop("concurrency", None)
    load = ("requests/s", float(rate)) if rate else ("clients", float(clients or 0))
    unchanged_clients = {"clients": clients} if rate else {}
    rest = {**config, "workload": workload, "arrivals": arrivals, **unchanged_clients}
    return (load if load[1] else None), json.dumps(rest, sort_keys=True)
