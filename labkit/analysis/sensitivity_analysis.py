"""The same question asked again: is the answer the machine's?

The rules are fixed here, before any data:

- probe-adjusted: where the probe correlates with what blocks leave over of the metric (0.5
  or more; which run is which arm's does not enter), its part is taken out;
- undisturbed: blocks are left out whole by the rules of ``labkit.analysis.disturbed_runs``,
  some of which read the machine while the arm ran (said there, and beside the numbers);
- with stalls, where they were taken out of arms that took turns, or without, where not
  (``labkit.analysis.stall_attribution``).

They are shown beside the verdict's own numbers and never replace them: their intervals and
p-values are of one row alone, not adjusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis.arm_comparison import interval_to_percent
from labkit.analysis.cell_analysis import CellAnalysis, CellData
from labkit.analysis.disturbed_runs import Disturbance, disturbed_blocks
from labkit.analysis.observations import MetricRow, complete_blocks, log_values
from labkit.analysis.statistics.effect_size import breakpoints, hodges_lehmann, to_percent
from labkit.analysis.statistics.permutation_test import (
    Floats,
    Relabellings,
    pool_by_block,
    relabellings,
    two_sided_p,
)
from labkit.analysis.statistics.probe_adjustment import noise_correlation, probe_adjusted

CORRELATES = 0.5
FEWEST_LEFT = 4  # degrees of freedom left by blocks; fewer correlate by chance


@dataclass(frozen=True)
class SensitivityResult:
    """A second analysis of one row and arm; ``how`` says which and on what grounds."""

    row: int
    arm: str
    how: str
    effect_pct: float
    ci_pct: tuple[float, float] | None
    p: float
    blocks: int


@dataclass(frozen=True)
class _Question:
    """The log values that a second analysis is made of, both float64 [blocks, runs]."""

    row: int
    arm: str
    how: str
    base: Floats
    other: Floats


def sensitivity_results(analysis: CellAnalysis) -> list[SensitivityResult]:
    """Return every second analysis of the primary rows that has grounds to be made."""
    data = analysis.data
    disturbed = disturbed_blocks(data.records)
    questions: list[_Question] = []
    found: list[SensitivityResult] = []
    for index, row in enumerate(analysis.rows):
        if not row.primary or row.skipped is not None or not row.positive:
            continue
        correlation = _correlation(row, data)
        for arm in analysis.comparisons[index]:
            found += _adjusted(index, row, arm, data, correlation)
            questions += _undisturbed(index, row, arm, data, disturbed)
            questions += _otherwise(index, arm, analysis)
    found += _answers(questions, data.criteria.alpha)
    places = {arm.name: i for i, arm in enumerate(data.arms)}
    return sorted(found, key=lambda second: (second.row, places[second.arm]))


def probe_correlations(analysis: CellAnalysis) -> list[tuple[str, float]]:
    """Return every primary row's case and how its metric correlates with the probe, -1 to 1."""
    data = analysis.data
    rows = [r for r in analysis.rows if r.primary and r.skipped is None and r.positive]
    found = ((row.case, _correlation(row, data)) for row in rows)
    return [(case, value) for case, value in found if value is not None]


def _correlation(row: MetricRow, data: CellData) -> float | None:
    names = [a.name for a in data.arms]
    blocks = complete_blocks(row, names, data.criteria.runs)
    if not blocks or any(key not in data.probe for key in _places(row, names, blocks)):
        return None
    tables = _tables(row, names, blocks, data.probe)
    if tables[0].size - len(blocks) < FEWEST_LEFT:
        return None
    return noise_correlation(*tables)


def _adjusted(
    index: int, row: MetricRow, arm: str, data: CellData, correlation: float | None
) -> Iterator[SensitivityResult]:
    if correlation is None or abs(correlation) < CORRELATES:
        return
    probe, pair = data.probe, (data.baseline, arm)
    blocks = complete_blocks(row, pair, data.criteria.runs)
    if not blocks or any(key not in probe for key in _places(row, pair, blocks)):
        return
    found = probe_adjusted(*_tables(row, pair, blocks, probe), data.criteria.alpha)
    if found is not None:
        yield SensitivityResult(
            row=index,
            arm=arm,
            how=f"probe-adjusted (correlation {correlation:.2f})",
            effect_pct=to_percent(found.effect),
            ci_pct=interval_to_percent(found.interval),
            p=found.p,
            blocks=len(blocks),
        )


def _places(row: MetricRow, arms: Sequence[str], blocks: Sequence[int]) -> list[tuple[int, int]]:
    return [(v.block, v.position) for a in arms for v in row.arms[a] if v.block in blocks]


def _tables(
    row: MetricRow,
    arms: Sequence[str],
    blocks: Sequence[int],
    probe: Mapping[tuple[int, int], float],
) -> tuple[Floats, Floats]:
    """Return log values and probes of complete blocks, both float64 [arms, blocks, runs]."""
    values = np.stack([log_values(row, arm, blocks) for arm in arms])
    probes = [probe[place] for place in _places(row, arms, blocks)]
    return values, np.array(probes).reshape(values.shape)


def _undisturbed(
    index: int,
    row: MetricRow,
    arm: str,
    data: CellData,
    disturbed: Mapping[int, Sequence[Disturbance]],
) -> Iterator[_Question]:
    blocks = complete_blocks(row, (data.baseline, arm), data.criteria.runs)
    kept = [b for b in blocks if b not in disturbed]
    if len(kept) == len(blocks) or not kept:
        return
    left_out = [b for b in blocks if b in disturbed]
    how = f"without disturbed blocks ({', '.join(map(str, left_out))})"
    if any(reason.during for b in left_out for reason in disturbed[b]):
        how += "; an arm may cause what disturbed them"
    base, other = log_values(row, data.baseline, kept), log_values(row, arm, kept)
    yield _Question(index, arm, how, base, other)


def _otherwise(index: int, arm: str, analysis: CellAnalysis) -> Iterator[_Question]:
    """Ask with the machine's stalls where the row is without, else without."""
    data = analysis.data
    if analysis.stalls is None:
        return
    row = analysis.alternative_rows[index]
    if not row.positive or row.arms == analysis.rows[index].arms:
        return
    blocks = complete_blocks(row, (data.baseline, arm), data.criteria.runs)
    if blocks:
        how = "without" if analysis.stalls.own is not None else "with"
        base, other = log_values(row, data.baseline, blocks), log_values(row, arm, blocks)
        yield _Question(index, arm, f"{how} stalls ({analysis.stalls.shares})", base, other)


def _answers(questions: Sequence[_Question], alpha: float) -> list[SensitivityResult]:
    """Answer all questions, in their order; those of as many blocks share a relabelling."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.base.shape, []).append(i)
    found: dict[int, SensitivityResult] = {}
    for (blocks, runs), members in groups.items():
        labels = relabellings(blocks, runs)
        units = [pool_by_block(questions[i].base, questions[i].other) for i in members]
        statistics = labels.mean_differences(np.stack(units, axis=1))
        for column, i in enumerate(members):
            found[i] = _answer(questions[i], statistics[:, column], labels, alpha)
    return [found[i] for i in range(len(questions))]


def _answer(
    question: _Question, statistics: Floats, labels: Relabellings, alpha: float
) -> SensitivityResult:
    limits = breakpoints(statistics, labels).interval(alpha)
    return SensitivityResult(
        row=question.row,
        arm=question.arm,
        how=question.how,
        effect_pct=to_percent(hodges_lehmann(question.base, question.other)),
        ci_pct=interval_to_percent(limits),
        p=two_sided_p(statistics),
        blocks=len(question.base),
    )
