"""One arm against the baseline, over all rows of a cell: numbers, no judgement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis.observations import MetricRow, complete_blocks, log_values
from labkit.analysis.statistics.effect_size import (
    Equivalence,
    equivalence_test,
    hodges_lehmann,
    to_percent,
)
from labkit.analysis.statistics.multiple_comparisons import (
    InvertedTest,
    RowPermutations,
    max_of_other_rows,
    per_row_alphas,
)
from labkit.analysis.statistics.permutation_test import Floats, min_p, pool_by_block, relabellings
from labkit.analysis.statistics.power import between_run_sd, mde_pct


@dataclass(frozen=True)
class DecisionCriteria:
    """What the design fixed beforehand: runs per block, alpha, margin (percent).

    ``withheld``: why nothing may be claimed now; alpha is 0 then.
    """

    runs: int
    alpha: float
    margin_pct: float
    withheld_reason: str | None = None


@dataclass(frozen=True)
class ArmComparison:
    """What the runs say about one arm in one row; None is unknown.

    ``effect_pct`` is above 0 where the metric is larger. ``ci_pct`` and ``p_adjusted`` are
    one test's, adjusted over the rows and arms: the interval is simultaneous and leaves out
    0 iff ``p_adjusted`` is at most alpha. ``ci_raw_pct`` and ``p`` are the row's alone.
    ``level``: of both intervals (0.95; 0.99 at a look that spends 0.01). ``p_floor``: the
    smallest ``p_adjusted`` that there can be. ``mde_pct``: the effect that gets a verdict in
    80 of 100 studies like this one; ``alpha_row`` the level that a row alone has for it.
    ``sd``: between runs, log scale.
    """

    arm: str
    baseline: str
    effect_pct: float | None = None
    ci_pct: tuple[float, float] | None = None
    p: float | None = None
    p_adjusted: float | None = None
    p_floor: float | None = None
    mde_pct: float | None = None
    wins: int | None = None
    blocks: int = 0
    sd: float | None = None
    equivalence: Equivalence | None = None
    ci_raw_pct: tuple[float, float] | None = None
    level: float | None = None
    alpha_row: float | None = None


def compare_arm(
    rows: Sequence[MetricRow],
    arm: str,
    baseline: str,
    levels: DecisionCriteria,
    arms_tested: int = 1,
) -> list[ArmComparison]:
    """Compare ``arm`` with ``baseline`` in every row.

    Intervals and p-values are adjusted over the rows of the primary metric as one family,
    over all other metrics as another (single-step max-T), and for ``arms_tested`` arms
    (C. E. Bonferroni): their relabellings are not shared.
    """
    found = [ArmComparison(arm, baseline) for _ in rows]
    for primary in (True, False):
        tests = row_tests(rows, arm, baseline, levels.runs, primary)
        if not tests:
            continue
        each = per_row_alphas(list(tests.values()), levels.alpha / arms_tested)
        others = max_of_other_rows(list(tests.values()))
        for (index, test), rest, alpha in zip(tests.items(), others, each, strict=True):
            region = test.inverted_test(rest, arms_tested)
            found[index] = _compare(rows[index], found[index], test, region, levels, alpha)
    return found


def row_tests(
    rows: Sequence[MetricRow], arm: str, baseline: str, runs: int, primary: bool
) -> dict[int, RowPermutations]:
    """Return the tests of one family by the rows' indices; rows without values have none.

    Rows that lack a block are tested on their own blocks, under the same relabellings.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if row.metric is None or row.skipped is not None or not row.positive:
            continue
        blocks = complete_blocks(row, (baseline, arm), runs)
        if blocks and row.primary == primary:
            groups.setdefault(blocks, []).append(index)
    every = sorted({block for blocks in groups for block in blocks})
    found: dict[int, RowPermutations] = {}
    for blocks, members in groups.items():
        labels = relabellings(len(every), runs).restrict_to_blocks(
            [every.index(block) for block in blocks]
        )
        pairs = [_arms(rows[i], arm, baseline, blocks) for i in members]
        units = np.stack([pool_by_block(*pair) for pair in pairs], axis=1)
        statistics = labels.mean_differences(units).T
        within = units.reshape(len(blocks), 2 * runs, len(members))
        squares = ((within - within.mean(axis=1, keepdims=True)) ** 2).sum(axis=(0, 1))
        for column, index in enumerate(members):
            found[index] = RowPermutations(labels, statistics[column], float(squares[column]))
    return dict(sorted(found.items()))


def _arms(row: MetricRow, arm: str, baseline: str, blocks: Sequence[int]) -> tuple[Floats, Floats]:
    return log_values(row, baseline, blocks), log_values(row, arm, blocks)


def _compare(
    row: MetricRow,
    start: ArmComparison,
    test: RowPermutations,
    region: InvertedTest,
    levels: DecisionCriteria,
    alpha: float,
) -> ArmComparison:
    """Fill in one row; ``alpha``: the level that the row alone is tested at."""
    blocks = complete_blocks(row, (start.baseline, start.arm), levels.runs)
    base, other = _arms(row, start.arm, start.baseline, blocks)
    alone, sd = test.inverted_test(), between_run_sd(base, other)
    sign = 1.0 if row.better == "higher" else -1.0
    better = sign * (other.mean(axis=1) - base.mean(axis=1)) > 0
    floor = region.n_families * min_p(len(blocks), levels.runs)
    claims = levels.withheld_reason is None
    return ArmComparison(
        arm=start.arm,
        baseline=start.baseline,
        effect_pct=to_percent(hodges_lehmann(base, other)),
        ci_pct=interval_to_percent(region.interval(levels.alpha)),
        p=alone.p(0.0),
        p_adjusted=region.p(0.0) if claims else None,
        p_floor=min(1.0, floor),
        mde_pct=None if sd is None else mde_pct(sd, len(blocks), levels.runs, alpha),
        wins=int(np.count_nonzero(better)),
        blocks=len(blocks),
        sd=sd,
        equivalence=equivalence_test(region, levels.margin_pct, levels.alpha) if claims else None,
        ci_raw_pct=interval_to_percent(alone.interval(levels.alpha)),
        level=1.0 - levels.alpha if claims else None,
        alpha_row=alpha if claims else None,
    )


def interval_to_percent(limits: tuple[float, float] | None) -> tuple[float, float] | None:
    """Turn an interval of log ratios into percent."""
    return None if limits is None else (to_percent(limits[0]), to_percent(limits[1]))
