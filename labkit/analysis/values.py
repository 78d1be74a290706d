"""Rows of a cell: for each case and metric, one number per run.

The number is the median of the metric over the run's repeats, on the log scale (for an
even count the geometric mean of the middle two). Repeats are never tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labkit.analysis.permutation import Floats
from labkit.experiment.record import Metric, Record

MEASURED = ("ok", "vacuous")


@dataclass(frozen=True)
class Value:
    """One run's number and where it came from (``file`` is relative to the cell)."""

    block: int
    position: int
    file: str
    value: float


@dataclass
class Row:
    """One case and metric with every arm's values; ``metric`` is None if it was skipped."""

    case: str
    metric: str | None
    unit: str | None
    better: str | None
    primary: bool
    skipped: str | None = None
    arms: dict[str, list[Value]] = field(default_factory=dict)

    def by_block(self, arm: str) -> dict[int, list[float]]:
        """Give an arm's values per block, in run order."""
        blocks: dict[int, list[float]] = {}
        for item in self.arms.get(arm, ()):
            blocks.setdefault(item.block, []).append(item.value)
        return blocks

    @property
    def positive(self) -> bool:
        """Whether all values have a logarithm."""
        return all(v.value > 0 for values in self.arms.values() for v in values)


def run_value(repeats: Sequence[float]) -> float:
    """Give the median of the repeats on the log scale (plain, where one is not positive)."""
    values = sorted(repeats)
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    low, high = values[middle - 1], values[middle]
    return math.sqrt(low * high) if low > 0 else (low + high) / 2.0


def build_rows(records: Iterable[Record]) -> list[Row]:
    """Build a cell's rows: cases in the order of the records, the primary metric first."""
    cases: dict[str, dict[str, Row]] = {}
    skipped: dict[str, str] = {}
    for record in records:
        file = f"runs/{record.run}.json"
        for case in record.cases:
            rows = cases.setdefault(case.case, {})
            if case.skipped is not None:
                skipped.setdefault(case.case, case.skipped)
            if record.outcome in MEASURED:
                for metric in case.metrics:
                    value = Value(record.block, record.position, file, run_value(metric.repeats))
                    arms = _row(rows, case.case, metric).arms
                    arms.setdefault(record.arm, []).append(value)
    ordered: list[Row] = []
    for name, rows in cases.items():
        if rows:
            ordered += sorted(rows.values(), key=lambda row: not row.primary)
        else:
            ordered.append(Row(name, None, None, None, True, skipped.get(name, "not measured")))
    return _name_skipped(ordered)


def _row(rows: dict[str, Row], case: str, metric: Metric) -> Row:
    found = rows.get(metric.name)
    if found is None:
        found = Row(case, metric.name, metric.unit, metric.better, metric.primary)
        rows[metric.name] = found
    return found


def _name_skipped(rows: list[Row]) -> list[Row]:
    """Give skipped rows the primary metric of the others: they are rows of the same table."""
    known = next((row for row in rows if row.metric is not None and row.primary), None)
    if known is not None:
        for row in rows:
            if row.metric is None:
                row.metric, row.unit, row.better = known.metric, known.unit, known.better
    return rows


def complete_blocks(row: Row, arms: Sequence[str], runs: int) -> tuple[int, ...]:
    """Give the blocks in which each of ``arms`` has all its ``runs`` values."""
    counts = [{b: len(v) for b, v in row.by_block(arm).items()} for arm in arms]
    return tuple(sorted(b for b in counts[0] if all(c.get(b) == runs for c in counts)))


def log_values(row: Row, arm: str, blocks: Sequence[int]) -> Floats:
    """Give an arm's log values, float64 [blocks, runs]."""
    values = row.by_block(arm)
    return np.log(np.array([values[b] for b in blocks], np.float64))


def summary(values: Sequence[Value]) -> dict[str, Any]:
    """Give median, quartiles and count of an arm's runs, with the runs themselves."""
    runs = [{"file": v.file, "value": v.value} for v in values]
    if not values:
        return {"median": None, "q1": None, "q3": None, "n": 0, "runs": runs}
    q1, median, q3 = np.percentile([v.value for v in values], [25, 50, 75])
    return {
        "median": float(median),
        "q1": float(q1),
        "q3": float(q3),
        "n": len(values),
        "runs": runs,
    }


def probe_values(records: Iterable[Record]) -> Mapping[tuple[int, int], float]:
    """Give each run's probe before the arm, by block and position: mean log microseconds."""
    found = {}
    for record in records:
        times = [t for t in record.probe.get("before", {}).values() if t > 0]
        if times:
            found[record.block, record.position] = float(np.mean(np.log(times)))
    return found
