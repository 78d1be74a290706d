"""Sensitivity analyses: would other reasonable analyses give the same result?

Rules that were fixed before any data were seen say which analyses apply:

- probe-adjusted: if the metric correlates with the machine probe within blocks (0.5 or more in
  size, computed without knowing which arm a run belongs to), the probe is regressed out of the
  metric;
- undisturbed: whole blocks are excluded by the rules of
  ``labkit.analysis.robustness.disturbed_runs``. If a rule used a reading taken while the arm ran, a
  note beside the numbers says so;
- stalls: included if the verdict excludes them, and excluded if the verdict includes them
  (``labkit.analysis.comparison.machine_or_arm_stalls``);
- mean of all launches, beside a typical launch
  (``labkit.analysis.comparison.slow_kernel_launches``).

The results are shown beside the verdict's own numbers and never replace them. Their intervals and
p-values are for one row alone, not adjusted for several rows or arms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis.comparison.arm_comparison import interval_to_percent
from labkit.analysis.comparison.cell_analysis import CellAnalysis, CellData
from labkit.analysis.comparison.observations import (
    MetricRow,
    complete_blocks,
    log_values,
    run_probes,
)
from labkit.analysis.robustness.disturbed_runs import disturbed_blocks
from labkit.analysis.statistics.hodges_lehmann import (
    breakpoints,
    hodges_lehmann,
    mean_difference,
    to_percent,
)
from labkit.analysis.statistics.permutation_test import (
    Floats,
    pool_by_block,
    relabellings,
    two_sided_p,
)
from labkit.analysis.statistics.probe_adjustment import noise_correlation, probe_adjusted

MIN_CORRELATION = 0.5
MIN_DF_WITHIN_BLOCKS = 4  # with fewer degrees of freedom, correlations arise by chance


@dataclass(frozen=True)
class SensitivityResult:
    """The result of one sensitivity analysis of one arm.

    ``row`` is the row's index. ``how`` names the analysis and the reason why it applies.
    """

    row: int
    arm: str
    how: str
    effect_pct: float
    ci_pct: tuple[float, float] | None
    p: float
    blocks: int


@dataclass(frozen=True)
class _Task:
    """A sensitivity analysis that is still to be computed.

    ``base`` and ``other`` are the log values of the baseline and the arm, float64 [blocks, runs].
    ``estimate`` returns the shift from one to the other.
    """

    row: int
    arm: str
    how: str
    base: Floats
    other: Floats
    estimate: Callable[[Floats, Floats], float] = hodges_lehmann


def sensitivity_results(analysis: CellAnalysis) -> list[SensitivityResult]:
    """Return the sensitivity analyses that apply to the primary rows, sorted by row and arm."""
    data = analysis.data
    disturbed = disturbed_blocks(data.records)
    tasks: list[_Task] = []
    results: list[SensitivityResult] = []
    for index, row in enumerate(analysis.rows):
        if not row.primary or row.skipped is not None:
            continue
        correlation = _correlation(row, data) if row.positive else None
        for arm in analysis.comparisons[index]:
            pair = row.pair(data.baseline, arm)
            if pair.positive:
                results += _adjusted(index, pair, arm, data, correlation)
                tasks += _undisturbed(index, pair, arm, data, disturbed)
                tasks += _other_stall_treatment(index, arm, analysis)
    alphas = [data.criteria_of(row.case).alpha for row in analysis.rows]
    results += _results(tasks, alphas)
    order = {arm.name: i for i, arm in enumerate(data.arms)}
    return sorted(results, key=lambda result: (result.row, order[result.arm]))


def probe_correlations(analysis: CellAnalysis) -> list[tuple[str, float]]:
    """Return primary rows' cases and their metrics' correlations with the probe, where known."""
    data = analysis.data
    rows = [r for r in analysis.rows if r.primary and r.skipped is None and r.positive]
    correlations = ((row.case, _correlation(row, data)) for row in rows)
    return [(case, value) for case, value in correlations if value is not None]


def _correlation(row: MetricRow, data: CellData) -> float | None:
    names = [arm.name for arm in data.arms if row.arms.get(arm.name)]  # without failed arms
    blocks = complete_blocks(row, names, data.criteria.runs)
    probes = run_probes(data.probe, row, names, blocks)
    if probes is None or probes.size - len(blocks) < MIN_DF_WITHIN_BLOCKS:
        return None
    return noise_correlation(np.stack([log_values(row, name, blocks) for name in names]), probes)


def _adjusted(
    index: int, row: MetricRow, arm: str, data: CellData, correlation: float | None
) -> Iterator[SensitivityResult]:
    if correlation is None or abs(correlation) < MIN_CORRELATION:
        return
    pair = (data.baseline, arm)
    blocks = complete_blocks(row, pair, data.criteria.runs)
    probes = run_probes(data.probe, row, pair, blocks)
    if probes is None:
        return
    values = np.stack([log_values(row, name, blocks) for name in pair])
    adjusted = probe_adjusted(values, probes, data.criteria_of(row.case).alpha)
    if adjusted is not None:
        how = f"probe-adjusted (correlation {correlation:.2f})"
        effect, interval = to_percent(adjusted.effect), interval_to_percent(adjusted.interval)
        yield SensitivityResult(index, arm, how, effect, interval, adjusted.p, len(blocks))


def _undisturbed(
    index: int,
    row: MetricRow,
    arm: str,
    data: CellData,
    disturbed: Mapping[int, Sequence[tuple[str, bool]]],
) -> Iterator[_Task]:
    pair = (data.baseline, arm)
    blocks = complete_blocks(row, pair, data.criteria.runs)
    excluded = [b for b in blocks if b in disturbed]
    undisturbed = [b for b in blocks if b not in disturbed]
    if excluded and undisturbed:
        how = f"without disturbed blocks ({', '.join(map(str, excluded))})"
        if any(during_arm for b in excluded for _, during_arm in disturbed[b]):
            how += "; an arm may have caused the disturbance"
        base, other = (log_values(row, name, undisturbed) for name in pair)
        yield _Task(index, arm, how, base, other)


def _other_stall_treatment(index: int, arm: str, analysis: CellAnalysis) -> Iterator[_Task]:
    """Yield the task with stalls if the verdict excludes them, and vice versa, or of the means."""
    data = analysis.data
    if index not in analysis.differing or not analysis.alternative_rows[index].positive:
        return
    row, pair = analysis.alternative_rows[index], (data.baseline, arm)
    if blocks := complete_blocks(row, pair, data.criteria.runs):
        base, other = (log_values(row, name, blocks) for name in pair)
        if data.stalls is None:
            yield _Task(index, arm, "mean of all launches", base, other, mean_difference)
        else:
            how = "without" if data.keeps_stalls else "with"
            yield _Task(index, arm, f"{how} stalls ({data.stalls.shares})", base, other)


def _results(tasks: Sequence[_Task], alphas: Sequence[float]) -> list[SensitivityResult]:
    """Return the results of the tasks, in their order. Tasks of equal shape share relabellings.

    ``alphas``: each row's, so that an interval has the level of the verdict's own beside it.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, task in enumerate(tasks):
        groups.setdefault(task.base.shape, []).append(i)
    results: dict[int, SensitivityResult] = {}
    for (blocks, runs), members in groups.items():
        labels = relabellings(blocks, runs)
        values = [pool_by_block(tasks[i].base, tasks[i].other) for i in members]
        differences = labels.mean_differences(np.stack(values, axis=1))
        for null, i in zip(differences.T, members, strict=True):
            task, limits = tasks[i], breakpoints(null, labels.label_correlation)
            effect = to_percent(task.estimate(task.base, task.other))
            interval = interval_to_percent(limits.interval(alphas[task.row]))
            numbers = effect, interval, two_sided_p(null), blocks
            results[i] = SensitivityResult(task.row, task.arm, task.how, *numbers)
    return [results[i] for i in range(len(tasks))]
