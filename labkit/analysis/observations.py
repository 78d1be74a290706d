"""Rows of a cell: for each case and metric, one number per run.

The number is the median of the metric over the run's repeats, on the log scale (for an
even count the geometric mean of the middle two). Repeats are never tested.

Where all arms of a block took turns in one process (``in_process``), repeat ``i`` of every
arm was taken in the same round, and what the machine did in that round happened to all. An
arm is compared with the baseline round by round then: its log value is the baseline's plus
the :func:`median_over_rounds` of the rounds' log ratios. Whose turn is first finds the caches
of the round before, whoever it is: what an arm's place in the rounds adds is taken out first
(:func:`without_position_effects`). Per-arm medians stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.statistics.permutation_test import Floats
from labkit.records import Metric, Record, RecordError

MEASURED_OUTCOMES = ("ok", "vacuous")
PASSES = 10  # of median polish at most


@dataclass(frozen=True)
class RunValue:
    """One run's number and where it came from (``file`` is relative to the cell)."""

    block: int
    position: int
    file: str
    value: float
    repeats: tuple[float, ...] = ()
    places: tuple[int, ...] = ()  # of the arm's turn in each round, from 0; (): not recorded


@dataclass
class MetricRow:
    """One case and metric with every arm's values; ``metric`` is None if it was skipped.

    ``paired_baseline``: the arm that the others are compared with round by round, in its own
    process; None where every run had a process of its own.
    """

    case: str
    metric: str | None
    unit: str | None
    better: str | None
    primary: bool
    skipped: str | None = None
    paired_baseline: str | None = None
    arms: dict[str, list[RunValue]] = field(default_factory=dict)
    _rounds: dict[int, dict[str, Floats]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rounds(self, block: int) -> dict[str, Floats]:
        """Return every arm's log values in a process, float64 [rounds], places taken out if known.

        Worked out once: every arm and analysis asks again, and a row that was built stays as it is.
        """
        if block not in self._rounds:
            found = {
                arm: v for arm, values in self.arms.items() for v in values if v.block == block
            }
            logs = np.log([v.repeats for v in found.values()])
            places = [v.places for v in found.values()]
            if all(len(each) == logs.shape[1] for each in places):
                logs = without_position_effects(logs, np.array(places))
            self._rounds[block] = dict(zip(found, logs, strict=True))
        return self._rounds[block]

    def by_block(self, arm: str) -> dict[int, list[float]]:
        """Return an arm's values per block, in run order."""
        blocks: dict[int, list[float]] = {}
        for item in self.arms.get(arm, ()):
            blocks.setdefault(item.block, []).append(item.value)
        return blocks

    @property
    def positive(self) -> bool:
        """Whether all values have a logarithm, and all repeats where rounds are paired."""
        every = (v for values in self.arms.values() for v in values)
        if self.paired_baseline is not None:
            return all(min(v.repeats) > 0 for v in every)
        return all(v.value > 0 for v in every)


def run_value(repeats: Sequence[float]) -> float:
    """Return the median of the repeats on the log scale (plain, where one is not positive)."""
    values = sorted(repeats)
    median_over_rounds = len(values) // 2
    if len(values) % 2:
        return values[median_over_rounds]
    low, high = values[median_over_rounds - 1], values[median_over_rounds]
    return math.sqrt(low * high) if low > 0 else (low + high) / 2.0


def median_over_rounds(log_ratios: Floats) -> float:
    """Return one number for a run's rounds, float64 [rounds]: their median."""
    return float(_medians(log_ratios))


def without_position_effects(logs: Floats, places: NDArray[np.int64]) -> Floats:
    """Return log values without what an arm's place in a round adds to them.

    The same is taken from all arms, so swapped labels swap the results: median polish of the
    distances from each round's middle, by arm and by place (J. W. Tukey).

    Parameters
    ----------
    logs
        float64 [arms, rounds].
    places
        int [arms, rounds]: whose turn was first, second, ...
    """
    left = logs - _medians(logs.T)
    added = np.zeros(places.max() + 1)
    turns = [(place, places == place) for place in np.unique(places)]
    for _ in range(PASSES):
        before = added.copy()
        apart = left - _medians(left - added[places])[:, None]
        for place, taken in turns:
            added[place] = _medians(apart[taken])
        if np.array_equal(before, added):
            break
    less: Floats = logs - added[places]
    return less


def _medians(values: Floats) -> Floats:
    """Return the medians along the last axis: numpy's own takes five times as long on so few."""
    ordered, half = np.sort(values), values.shape[-1] // 2
    if values.shape[-1] % 2:
        return np.asarray(ordered[..., half])
    return np.asarray((ordered[..., half - 1] + ordered[..., half]) / 2.0)


def build_rows(records: Iterable[Record], paired_baseline: str | None = None) -> list[MetricRow]:
    """Build a cell's rows: cases in the order of the records, the primary metric first.

    Parameters
    ----------
    by_round
        The baseline, where the arms of a block took turns in one process.

    Raises
    ------
    RecordError
        Arms that took turns do not have as many repeats as the baseline.
    """
    cases: dict[str, dict[str, MetricRow]] = {}
    skipped: dict[str, str] = {}
    for record in records:
        file = f"runs/{record.run}.json"
        for case in record.cases:
            rows = cases.setdefault(case.case, {})
            if case.skipped is not None:
                skipped.setdefault(case.case, case.skipped)
            if record.outcome in MEASURED_OUTCOMES:
                for metric in case.metrics:
                    value = RunValue(
                        record.block,
                        record.position,
                        file,
                        run_value(metric.repeats),
                        tuple(metric.repeats) if paired_baseline is not None else (),
                        tuple(case.notes.get("turns", ())),
                    )
                    row = _row(rows, case.case, metric, paired_baseline)
                    row.arms.setdefault(record.arm, []).append(value)
    ordered: list[MetricRow] = []
    for name, rows in cases.items():
        if rows:
            ordered += sorted(rows.values(), key=lambda row: not row.primary)
            for row in rows.values():
                _check_rounds(row)
        else:
            ordered.append(
                MetricRow(name, None, None, None, True, skipped.get(name, "not measured"))
            )
    return _name_skipped(ordered)


def _row(
    rows: dict[str, MetricRow], case: str, metric: Metric, paired_baseline: str | None
) -> MetricRow:
    found = rows.get(metric.name)
    if found is None:
        found = MetricRow(
            case,
            metric.name,
            metric.unit,
            metric.better,
            metric.primary,
            paired_baseline=paired_baseline,
        )
        rows[metric.name] = found
    return found


def _check_rounds(row: MetricRow) -> None:
    """Refuse arms whose rounds are not the baseline's."""
    if row.paired_baseline is None:
        return
    rounds = {v.block: len(v.repeats) for v in row.arms.get(row.paired_baseline, ())}
    for values in row.arms.values():
        for v in values:
            if len(v.repeats) != rounds.get(v.block, len(v.repeats)):
                raise RecordError(
                    f"{v.file}: {row.case!r} has {len(v.repeats)} repeats of {row.metric} where "
                    f"{row.paired_baseline}, in the same process, has {rounds[v.block]}"
                )


def _name_skipped(rows: list[MetricRow]) -> list[MetricRow]:
    """Name skipped rows by the primary metric of the others: they are rows of the same table."""
    known = next((row for row in rows if row.metric is not None and row.primary), None)
    if known is not None:
        for row in rows:
            if row.metric is None:
                row.metric, row.unit, row.better = known.metric, known.unit, known.better
    return rows


def complete_blocks(row: MetricRow, arms: Sequence[str], runs: int) -> tuple[int, ...]:
    """Return the blocks in which each of ``arms`` has all its ``runs`` values."""
    counts = [{b: len(v) for b, v in row.by_block(arm).items()} for arm in arms]
    return tuple(sorted(b for b in counts[0] if all(c.get(b) == runs for c in counts)))


def log_values(row: MetricRow, arm: str, blocks: Sequence[int]) -> Floats:
    """Return an arm's log values, float64 [blocks, runs]; see the module for turns."""
    if row.paired_baseline is not None and arm != row.paired_baseline:
        return _paired_values(row, arm, blocks)
    values = row.by_block(arm)
    return np.log(np.array([values[b] for b in blocks], np.float64))


def _paired_values(row: MetricRow, arm: str, blocks: Sequence[int]) -> Floats:
    """Return the baseline's log values plus the middle of the log ratios, float64 [blocks, 1]."""
    first = str(row.paired_baseline)
    ratios = [median_over_rounds(logs[arm] - logs[first]) for logs in map(row.rounds, blocks)]
    paired: Floats = log_values(row, first, blocks) + np.array(ratios)[:, None]
    return paired


def summary(values: Sequence[RunValue]) -> dict[str, Any]:
    """Return median, quartiles and count of an arm's runs, with the runs themselves."""
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
    """Return each run's probe before the arm, by block and position: mean log microseconds."""
    found = {}
    for record in records:
        times = [t for t in record.probe.get("before", {}).values() if t > 0]
        if times:
            found[record.block, record.position] = float(np.mean(np.log(times)))
    return found
