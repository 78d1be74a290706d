"""Observations of a cell: for each case and metric, one number per run.

The number is the median of the metric over the run's repeats, on the log scale (for an even
count, the geometric mean of the middle two). Tests use this number and never the repeats, which are
not independent samples.

In a block whose arms were interleaved (``in_process`` or ``live``), repeat ``i`` of every
arm was taken in the same round, and whatever the machine did in that round happened to all
arms. In such a block an arm is compared with the baseline round by round: the arm's log value is
the baseline's plus a middle of the rounds' log ratios (:data:`OVER_ROUNDS`). An arm's position
within a round matters, because the first arm finds the caches as the previous round left them. So
the effect of the position is removed first (:func:`without_position_effects`). The medians shown
for each arm are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.model.result_row import ArmValues, RunResult
from labkit.analysis.statistics.hodges_lehmann import to_log_ratio, to_percent
from labkit.analysis.statistics.permutation_test import Floats
from labkit.analysis.statistics.power import min_blocks_to_claim
from labkit.config import count_text
from labkit.records import CaseRecord, Metric, Record, RecordError
from labkit.records.metric_registry import metric_definition

MEASURED_OUTCOMES = ("ok", "vacuous")
POLISH_TOLERANCE = 1e-9  # of a log ratio
MAX_POLISH_PASSES = 1000
MIN_ROUNDS = 3  # with fewer, no launch is typical


@dataclass(frozen=True)
class RunValue:
    """One metric's value in one run. ``file`` is the path of the run's record within the cell.

    ``repeats`` is empty unless arms were interleaved. ``round_positions`` is the arm's position in
    each round, from 0, or empty if not recorded.
    """

    block: int
    position: int
    file: str
    value: float
    repeats: tuple[float, ...] = ()
    round_positions: tuple[int, ...] = ()


@dataclass
class MetricRow:
    """One metric of one case, with the values of every arm.

    For a skipped case, ``skipped`` is the reason, and ``metric`` is the primary metric of the
    measured rows (None if there are none). ``paired_baseline`` is the baseline's name if arms were
    interleaved and are compared round by round. It is None if every run had its own process.
    ``unit_value`` is set if arms are compared by differences, in units of this value, and not by
    ratios; see ``pair``. ``over_rounds`` is the estimator of a process's log ratio, a key of
    :data:`OVER_ROUNDS`. ``left_out`` is a sentence for each arm whose values are not in the row:
    they have another unit, or other rounds than the baseline's.
    """

    case: str
    metric: str | None
    unit: str | None
    better: str | None
    primary: bool
    skipped: str | None = None
    paired_baseline: str | None = None
    arms: dict[str, list[RunValue]] = field(default_factory=dict)
    unit_value: float | None = None
    over_rounds: str = "median"
    left_out: dict[str, str] = field(default_factory=dict)
    _rounds: dict[int, dict[str, Floats]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rounds(self, block: int) -> dict[str, Floats]:
        """Return every arm's log values in a block's process, float64 [rounds], by arm.

        Position effects are removed if positions were recorded. The result is cached, because it
        is used for every arm and by several analyses.
        """
        if block not in self._rounds:
            by_arm = {
                arm: v for arm, values in self.arms.items() for v in values if v.block == block
            }
            logs = np.log([v.repeats for v in by_arm.values()])
            positions = [v.round_positions for v in by_arm.values()]
            if all(len(each) == logs.shape[1] for each in positions):
                logs = without_position_effects(logs, np.array(positions))
            self._rounds[block] = dict(zip(by_arm, logs, strict=True))
        return self._rounds[block]

    def before(self, block: int) -> MetricRow:
        arms = {arm: [v for v in vs if v.block < block] for arm, vs in self.arms.items()}
        return replace(self, arms={arm: values for arm, values in arms.items() if values})

    def by_block(self, arm: str) -> dict[int, list[float]]:
        """Return an arm's values per block, in run order."""
        blocks: dict[int, list[float]] = {}
        for item in self.arms.get(arm, ()):
            blocks.setdefault(item.block, []).append(item.value)
        return blocks

    @property
    def has_slow_launches(self) -> bool:
        """Whether single launches were timed in rounds, so that some can be slow.

        As many processes as a claim needs (all, if there are fewer) must have enough rounds.
        """
        times = self.better == "lower" and self.paired_baseline is not None and self.positive
        rounds = sorted(len(v.repeats) for v in self.arms.get(self.paired_baseline or "", ()))
        longest = rounds[-min_blocks_to_claim(runs=1) :]
        return times and min(longest, default=0) >= MIN_ROUNDS

    @property
    def is_computed(self) -> bool:
        """Whether the values follow from sizes and counts, so that there is no noise to test.

        True if the metric is defined as computed and each arm has the same value in all its runs.
        """
        return (
            metric_definition(self.metric, self.unit).computed
            and bool(self.arms)
            and all(len({v.value for v in values}) == 1 for values in self.arms.values())
        )

    @cached_property
    def positive(self) -> bool:
        """Whether all values (all repeats, if rounds are paired) are above 0.

        It is asked for when all arms have their values.
        """
        paired, values = self.paired_baseline is not None, self.arms.values()
        return all((min(v.repeats) if paired else v.value) > 0 for vs in values for v in vs)

    def pair(self, baseline: str, arm: str) -> MetricRow:
        """Return the row in which two arms are compared, whatever the values of other arms are.

        It is this row, or that of the two alone if a value is not above 0. If one of theirs is 0,
        none is below 0, and 0 is a result of the metric, they are compared by differences, in units
        of the baseline's mean. If that is 0, the unit is the metric's own, and the difference has
        no percentage. In a row that is tested, this holds for two constant arms, too.
        """
        if self.positive or self.is_computed:
            return self
        own = {name: self.arms[name] for name in (baseline, arm) if name in self.arms}
        row = replace(self, arms=own)
        if row.is_computed:  # whether a row is tested does not depend on the pair
            row = replace(self)
        is_result = metric_definition(self.metric, self.unit).zero_is_result
        if is_result and not row.positive and min(v.value for vs in own.values() for v in vs) >= 0:
            row.unit_value = float(np.mean([v.value for v in own.get(baseline, ())] or [0])) or 1.0
        return row

    def is_zero(self, arm: str) -> bool:
        """Whether 0 is a result of this metric, and every run of an arm has this result."""
        values = self.arms.get(arm, ())
        zeros = bool(values) and not any(v.value for v in values)
        return zeros and metric_definition(self.metric, self.unit).zero_is_result

    @property
    def comparable(self) -> bool:
        """Whether arms can be compared: by ratios of values above 0, or by differences."""
        return self.positive or self.unit_value is not None

    def to_percent(self, shift: float) -> float:
        """Convert a shift to percent, at least -100.

        A shift is a log ratio or, if ``unit_value`` is set, a difference in units of it.
        """
        return to_percent(shift) if self.unit_value is None else max(-100.0, 100.0 * shift)

    def to_shift(self, pct: float) -> float:
        return to_log_ratio(pct) if self.unit_value is None else pct / 100.0


def run_value(repeats: Sequence[float]) -> float:
    """Return the median of the repeats.

    For an even count it is the geometric mean of the middle two, or their arithmetic mean if one
    of them is not positive.
    """
    values = sorted(repeats)
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    low, high = values[middle - 1], values[middle]
    return math.sqrt(low * high) if low > 0 else (low + high) / 2.0


def _middle_half_over_rounds(baseline: Floats, arm: Floats) -> float:
    """Return the interquartile mean of the log ratios; its outermost two may count in part."""
    ratios = np.sort(arm - baseline)
    cut, part = divmod(len(ratios) / 4, 1)
    weights = np.zeros(len(ratios))
    weights[int(cut) : len(ratios) - int(cut)] = 1.0
    weights[int(cut)] -= part
    weights[-1 - int(cut)] -= part
    return float(weights @ ratios / weights.sum())


# Estimators of two arms' log ratio from their log values, float64 [rounds] each.
OVER_ROUNDS: Mapping[str, Callable[[Floats, Floats], float]] = {
    # Records without a note (until November 2026) have the median.
    "median": lambda baseline, arm: float(_medians(arm - baseline)),
    "middle_half": _middle_half_over_rounds,
    "mean": lambda base, arm: float(np.log(np.exp(arm).mean() / np.exp(base).mean())),
}


def without_position_effects(logs: Floats, positions: NDArray[np.int64]) -> Floats:
    """Return log values without the effect of an arm's position in a round.

    The effects are estimated by median polish (J. W. Tukey) of the differences from each round's
    mean, by arm and by position, until no effect changes by more than 1e-9. An arm's own effect
    shifts all its differences equally, so the position effects do not depend on it. (Differences
    from the round's median would not do: one arm of every round would have the difference 0, and a
    part of its effect would be attributed to its position.) The same effects are subtracted from
    all arms, so swapping two arms' labels swaps their results.

    ``logs``: float64 [arms, rounds]. ``positions``: int [arms, rounds]: 0 for the arm that came
    first in the round, 1 for the second, ...
    """
    centred = logs - logs.mean(axis=0)
    effects = np.zeros(positions.max() + 1)
    masks = [(position, positions == position) for position in np.unique(positions)]
    for _ in range(MAX_POLISH_PASSES):
        before = effects.copy()
        residual = centred - _medians(centred - effects[positions])[:, None]
        for position, mask in masks:
            effects[position] = _medians(residual[mask])
        if np.abs(effects - before).max() <= POLISH_TOLERANCE:
            break
    return np.asarray(logs - effects[positions])


def _medians(values: Floats) -> Floats:
    """Return medians along the last axis; ``np.median`` takes five times as long at this size."""
    ordered, half = np.sort(values), values.shape[-1] // 2
    if values.shape[-1] % 2:
        return np.asarray(ordered[..., half])
    return np.asarray((ordered[..., half - 1] + ordered[..., half]) / 2.0)


def build_rows(
    records: Iterable[Record], paired_baseline: str | None = None, metrics: Sequence[str] = ()
) -> list[MetricRow]:
    """Build a cell's rows: cases in the order of the records, each case's primary metrics first.

    ``paired_baseline``: the baseline's name if the arms of a block were interleaved in one process,
    else None. ``metrics``: the primary metrics, the most important first; if empty, the records
    mark them. An arm is left out of a row if its values have another unit than the baseline's, or
    if it was interleaved and has not as many repeats in every block.
    """
    records = list(records)
    baseline = next((record.arm for record in records if record.role == "baseline"), "")
    cases: dict[str, dict[tuple[str, ...], MetricRow]] = {}
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
                        tuple(case.known_notes.get("turns", ())),
                    )
                    row = _row(rows, case, metric, paired_baseline, file)
                    row.arms.setdefault(record.arm, []).append(value)
    ordered: list[MetricRow] = []
    for name, rows in cases.items():
        measured = _in_one_unit(rows.values(), baseline)
        for row in measured:
            _leave_out_other_rounds(row)
            row.primary = row.metric in metrics if metrics else row.primary
        skip = MetricRow(name, None, None, None, True, skipped.get(name, "not measured"))
        ordered += sorted(measured, key=lambda row: _rank(row, metrics)) or [skip]
    return _name_skipped(ordered)


def _rank(row: MetricRow, metrics: Sequence[str]) -> int:
    """Return a row's sort key within its case: smaller for more important metrics."""
    if not row.primary:
        return len(metrics) + 1
    return metrics.index(str(row.metric)) if metrics else 0


def _row(
    rows: dict[tuple[str, ...], MetricRow],
    case: CaseRecord,
    metric: Metric,
    paired_baseline: str | None,
    file: str,
) -> MetricRow:
    key = metric.name, metric.unit, metric.better
    row = rows.get(key)
    if row is None:
        over_rounds = case.known_notes.get("over_rounds", "median")
        if over_rounds not in OVER_ROUNDS:
            raise RecordError(f"{file}: {case.case!r} has an unknown over_rounds: {over_rounds!r}")
        row = MetricRow(
            *(case.case, metric.name, metric.unit, metric.better, metric.primary),
            paired_baseline=paired_baseline,
            over_rounds=over_rounds,
        )
        rows[key] = row
    return row


def _in_one_unit(rows: Iterable[MetricRow], baseline: str) -> list[MetricRow]:
    """Return one row per metric: the one in the baseline's unit, else that of the first run.

    Arms of a user's own kind may report a metric in several units.
    """
    by_metric: dict[str | None, list[MetricRow]] = {}
    for row in rows:
        by_metric.setdefault(row.metric, []).append(row)
    kept = []
    for metric, same in by_metric.items():
        row = next((row for row in same if baseline in row.arms), same[0])
        kept.append(row)
        for other in same:
            row.left_out |= {
                arm: f"{arm} reports {metric} in {other.unit} ({other.better} is better), other "
                f"runs in {row.unit} ({row.better} is better)"
                for arm in other.arms
                if other is not row
            }
    return kept


def _leave_out_other_rounds(row: MetricRow) -> None:
    rounds = {v.block: len(v.repeats) for v in row.arms.get(row.paired_baseline or "", ())}
    for arm, values in list(row.arms.items()):
        other = (v for v in values if len(v.repeats) != rounds.get(v.block, len(v.repeats)))
        if (v := next(other, None)) is not None:
            row.left_out[arm] = (
                f"{arm} has {count_text(len(v.repeats), 'repeat')} of {row.metric} in {v.file}, "
                f"but {row.paired_baseline} has {rounds[v.block]} in the same block"
            )
            del row.arms[arm]


def _name_skipped(rows: list[MetricRow]) -> list[MetricRow]:
    """Give skipped rows the measured rows' primary metric, so that one table shows both."""
    primary = next((row for row in rows if row.metric is not None and row.primary), None)
    if primary is not None:
        for row in rows:
            if row.metric is None:
                row.metric, row.unit, row.better = primary.metric, primary.unit, primary.better
    return rows


def complete_blocks(row: MetricRow, arms: Sequence[str], runs: int) -> tuple[int, ...]:
    """Return the blocks in which each of ``arms`` has ``runs`` values."""
    counts = [{b: len(v) for b, v in row.by_block(arm).items()} for arm in arms]
    return tuple(sorted(b for b in counts[0] if all(c.get(b) == runs for c in counts)))


def log_values(row: MetricRow, arm: str, blocks: Sequence[int]) -> Floats:
    """Return an arm's log values, float64 [blocks, runs].

    The values of an interleaved arm are paired with the baseline's round by round. If arms are
    compared by differences, these are no logarithms, but values in units of ``row.unit_value``.
    """
    if row.unit_value is not None:
        by_block = row.by_block(arm)
        return np.array([by_block[b] for b in blocks], np.float64) / row.unit_value
    values = row.by_block(arm if row.paired_baseline is None else row.paired_baseline)
    logs: Floats = np.log(np.array([values[b] for b in blocks], np.float64))
    if row.paired_baseline in (None, arm):
        return logs
    baseline, ratio = str(row.paired_baseline), OVER_ROUNDS[row.over_rounds]
    ratios = [ratio(rounds[baseline], rounds[arm]) for rounds in map(row.rounds, blocks)]
    return np.asarray(logs + np.array(ratios)[:, None])


def arm_values(values: Sequence[RunValue]) -> ArmValues:
    """Return the median, quartiles and number of an arm's runs, and the runs themselves."""
    if not values:
        return ArmValues()
    q1, median, q3 = np.percentile([v.value for v in values], [25, 50, 75])
    runs = tuple(RunResult(v.file, v.value) for v in values)
    return ArmValues(float(median), float(q1), float(q3), len(values), runs)


def probe_values(records: Iterable[Record]) -> Mapping[tuple[int, int], float]:
    """Return the result of the probe that ran before each run's arm, by (block, position).

    The result is the mean, over the probe's kernels, of the log of the time in microseconds. Runs
    without a probe are left out.
    """
    probes = {}
    for record in records:
        times = [t for t in record.probe.get("before", {}).values() if t > 0]
        if times:
            probes[record.block, record.position] = float(np.mean(np.log(times)))
    return probes


def run_probes(
    probe: Mapping[tuple[int, int], float],
    row: MetricRow,
    arms: Sequence[str],
    blocks: Sequence[int],
) -> Floats | None:
    """Return the probes of arms' runs, float64 [arms, blocks, runs]; None if one is missing.

    ``probe``: as from :func:`probe_values`.
    """
    places = [(v.block, v.position) for a in arms for v in row.arms[a] if v.block in blocks]
    if not places or any(place not in probe for place in places):
        return None
    return np.array([probe[place] for place in places]).reshape(len(arms), len(blocks), -1)
