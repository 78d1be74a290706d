"""Load curves: an arm's latency against its throughput under increasing load, and the knee.

A curve joins cells that differ in their load alone (a rate or a number of clients). Its knee is the
load with the greatest power, which is throughput over latency (L. Kleinrock, "Power and
deterministic rules of thumb for probabilistic problems in computer communications", ICC 1979).
Below the knee, the engine could serve more requests at hardly any extra latency; above it, latency
grows faster than throughput. Throughput is in requests per second, and latency is the median time
to the last token.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.served_requests import REQUESTS_PER_S, rate_unit

if TYPE_CHECKING:
    from labkit.analysis.studies.cell_summary import CellSummary

LOAD_OPTIONS = ("workload.concurrency", "workload.arrivals.rate")
SESSIONS_PER_S = "sessions/s"
MIN_LOADS = 3  # a curve needs this many different loads
METRICS = ("request_s", "total_tok_s", "ttft_p50_ms", "e2e_p50_ms", "e2e_p99_ms")


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


def load_curves(cells: Sequence[CellSummary], labels: Sequence[str]) -> list[LoadCurve]:
    """Return a study's load curves: cells that differ in their load alone are one curve per arm.

    ``labels``: the cells' labels without ``LOAD_OPTIONS``.
    """
    groups: dict[tuple[str, str], list[ArmLoad]] = {}
    names: dict[tuple[str, str], str] = {}
    for cell, label in zip(cells, labels, strict=True):
        for one in cell.loads:
            key = (one.rest, one.arm)  # an arm with a rate has another rest than one with clients
            names[key] = f"{one.arm}, {label}"
            groups.setdefault(key, []).append(one)
    curves = {
        key: loads
        for key, loads in groups.items()
        if len({one.load.size for one in loads}) >= MIN_LOADS
    }
    several = Counter(arm for _, arm in curves)
    return [
        LoadCurve(
            key[1],
            names[key] if several[key[1]] > 1 else key[1],
            shared_unit([one.by for one in loads]),
            tuple(sorted((one.load for one in loads), key=lambda load: load.size)),
        )
        for key, loads in curves.items()
    ]


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
