"""Comparison of an arm with the baseline in every row of a cell: effects, intervals, p-values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit.analysis.comparison.observations import MetricRow, complete_blocks, log_values
from labkit.analysis.model.result_row import Comparison
from labkit.analysis.statistics.equivalence_test import equivalence_test
from labkit.analysis.statistics.hodges_lehmann import hodges_lehmann, to_percent
from labkit.analysis.statistics.multiple_comparisons import (
    InvertedTest,
    RowPermutations,
    max_of_other_rows,
    per_row_alphas,
)
from labkit.analysis.statistics.permutation_test import (
    Floats,
    pool_by_block,
    relabellings,
    smallest_p,
)
from labkit.analysis.statistics.power import between_run_sd, mde_pct

OUT_OF_REACH = "deciding it would take longer than design.time"


@dataclass(frozen=True)
class DecisionCriteria:
    """What the design fixed before the first run: runs per block, alpha and margin (percent).

    ``withheld_reason`` is the reason why nothing may be claimed, or None. While nothing may be
    claimed of any row, ``alpha`` is 0.
    """

    runs: int
    alpha: float
    margin_pct: float
    withheld_reason: str | None = None


def compare_arm(
    rows: Sequence[MetricRow],
    arm: str,
    baseline: str,
    criteria: DecisionCriteria,
    arms_tested: int = 1,
    estimated: Collection[int] = (),
    only: Container[int] | None = None,
) -> list[Comparison]:
    """Compare ``arm`` with ``baseline`` in every row; return one comparison per row.

    ``only``: indices of the rows whose comparisons are wanted; the others stay empty.

    Intervals and p-values are adjusted by single-step max-T over the primary rows as one family
    and over all other rows as another. Max-T cannot span several arms, because the tests of two
    arms share no relabelling. So the method of C. E. Bonferroni adjusts for ``arms_tested`` arms.
    Rows that are only ``estimated`` (their indices) are in no family: their intervals are their
    own, and nothing is claimed of them.
    """
    rows = [row.pair(baseline, arm) for row in rows]
    comparisons = [
        _computed(row, arm, baseline, criteria.runs)
        if row.is_computed
        else Comparison(arm, baseline)
        for row in rows
    ]
    for primary in (True, False):
        paired = paired_rows(rows, arm, baseline, criteria.runs, primary, estimated)
        tests = paired_tests(paired, criteria.runs)
        if not any(only is None or index in only for index in tests):
            continue
        each = per_row_alphas(list(tests.values()), criteria.alpha / arms_tested)
        others = max_of_other_rows(list(tests.values()))
        for (index, test), rest, alpha in zip(tests.items(), others, each, strict=True):
            if only is not None and index not in only:
                continue
            adjusted = test.inverted_test(rest, arms_tested)
            comparisons[index] = _compare(
                rows[index], comparisons[index], test, adjusted, criteria, alpha
            )
    alone = replace(criteria, withheld_reason=criteria.withheld_reason or OUT_OF_REACH)
    for index in estimated:
        if only is not None and index not in only:
            continue
        comparisons[index] = compare_arm([rows[index]], arm, baseline, alone)[0]
    return comparisons


def effect_pct(
    row: MetricRow,
    arm: str,
    baseline: str,
    runs: int,
    estimate: Callable[[Floats, Floats], float] = hodges_lehmann,
) -> float | None:
    """Return the estimated effect of an arm in one row, or None if no block can be compared."""
    row = row.pair(baseline, arm)
    blocks = complete_blocks(row, (baseline, arm), runs)
    if not blocks or not row.comparable or row.is_zero(baseline):
        return None
    return row.to_percent(estimate(*_arms(row, arm, baseline, blocks)))


@dataclass(frozen=True)
class PairedRow:
    """A row's log values of two arms in their complete blocks: what its test needs.

    ``values``: float64 [2 * runs * blocks], in the order of :func:`pool_by_block`.
    """

    index: int
    blocks: tuple[int, ...]
    values: Floats


def paired_rows(
    rows: Sequence[MetricRow],
    arm: str,
    baseline: str,
    runs: int,
    primary: bool,
    without: Collection[int] = (),
) -> list[PairedRow]:
    """Return the values of each row with ``row.primary == primary`` that has a test.

    Skipped and computed rows, rows without a complete block and rows with values that are not
    comparable have no test, nor have those with the indices ``without``.
    """
    paired = []
    for index, row in enumerate(rows):
        if row.metric is None or row.skipped is not None or not row.comparable or row.is_computed:
            continue
        blocks = complete_blocks(row, (baseline, arm), runs)
        if blocks and row.primary == primary and index not in without:
            values = pool_by_block(*_arms(row, arm, baseline, blocks))
            paired.append(PairedRow(index, blocks, values))
    return paired


def paired_tests(rows: Sequence[PairedRow], runs: int) -> dict[int, RowPermutations]:
    """Return the rows' permutation tests by row index; each holds up to 150,000 differences.

    A row that lacks a block is tested on its other blocks, under the same relabellings.
    """
    groups: dict[tuple[int, ...], list[PairedRow]] = {}
    for row in rows:
        groups.setdefault(row.blocks, []).append(row)
    all_blocks = sorted({block for blocks in groups for block in blocks})
    tests: dict[int, RowPermutations] = {}
    for blocks, members in groups.items():
        labels = relabellings(len(all_blocks), runs).restrict_to_blocks(
            [all_blocks.index(block) for block in blocks]
        )
        values = np.stack([row.values for row in members], axis=1)
        differences = labels.half_differences(values).T
        within = values.reshape(len(blocks), 2 * runs, len(members))
        squares = ((within - within.mean(axis=1, keepdims=True)) ** 2).sum(axis=(0, 1))
        for column, row in enumerate(members):
            tests[row.index] = RowPermutations(labels, differences[column], float(squares[column]))
    return dict(sorted(tests.items()))


def _computed(row: MetricRow, arm: str, baseline: str, runs: int) -> Comparison:
    """Return the difference of two computed values: in percent, if it is of a value above 0."""
    blocks = len(complete_blocks(row, (baseline, arm), runs))
    if not blocks:
        return Comparison(arm, baseline)
    base, value = (row.arms[name][0].value for name in (baseline, arm))
    if base > 0 and value >= 0:
        return Comparison(arm, baseline, effect_pct=100.0 * (value / base - 1.0), blocks=blocks)
    return Comparison(arm, baseline, difference=value - base, blocks=blocks)


def _arms(row: MetricRow, arm: str, baseline: str, blocks: Sequence[int]) -> tuple[Floats, Floats]:
    return log_values(row, baseline, blocks), log_values(row, arm, blocks)


def _compare(
    row: MetricRow,
    start: Comparison,
    test: RowPermutations,
    adjusted: InvertedTest,
    criteria: DecisionCriteria,
    alpha: float,
) -> Comparison:
    """Compare two arms in a row; ``alpha``: the row's own, which gives the detectable effect."""
    blocks = complete_blocks(row, (start.baseline, start.arm), criteria.runs)
    base, other = _arms(row, start.arm, start.baseline, blocks)
    alone, interval = test.inverted_test(), adjusted.interval(criteria.alpha)
    sign = 1.0 if row.better == "higher" else -1.0
    better = sign * (other.mean(axis=1) - base.mean(axis=1)) > 0
    floor = adjusted.n_families * smallest_p(len(blocks), criteria.runs)
    claims, estimate = criteria.withheld_reason is None, hodges_lehmann(base, other)
    tested = replace(
        start,
        p=alone.p(0.0),
        p_adjusted=adjusted.p(0.0) if claims else None,
        p_floor=min(1.0, floor),
        wins=int(np.count_nonzero(better)),
        blocks=len(blocks),
        level=1.0 - criteria.alpha if claims else None,
    )
    if row.is_zero(start.baseline):
        return replace(tested, difference=estimate, difference_ci=interval)
    sd = between_run_sd(base, other) if row.positive else None
    low, high = interval_to_percent(interval, row.to_percent) or (None, None)
    raw = interval_to_percent(alone.interval(criteria.alpha), row.to_percent) or (None, None)
    equal, scale = None, (row.to_shift, row.to_percent)
    if claims:
        equal = equivalence_test(adjusted, criteria.margin_pct, criteria.alpha, *scale)
    return replace(
        tested,
        effect_pct=row.to_percent(estimate),
        ci_low_pct=low,
        ci_high_pct=high,
        ci_raw_low_pct=raw[0],
        ci_raw_high_pct=raw[1],
        mde_pct=None if sd is None else mde_pct(sd, len(blocks), criteria.runs, alpha),
        sd=sd,
        equivalence=equal,
        alpha_row=alpha if claims else None,
    )


def interval_to_percent(
    limits: tuple[float, float] | None, convert: Callable[[float], float] = to_percent
) -> tuple[float, float] | None:
    """Convert an interval of shifts, by default of log ratios, to percent."""
    return None if limits is None else (convert(limits[0]), convert(limits[1]))
