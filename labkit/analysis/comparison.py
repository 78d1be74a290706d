"""One arm against the baseline, over all rows of a cell: numbers, no judgement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.analysis.effect import breakpoints, hodges_lehmann, percent
from labkit.analysis.equivalence import Equivalence, equivalence
from labkit.analysis.multiplicity import max_t, standardised
from labkit.analysis.permutation import Floats, pooled, relabellings, smallest_p, two_sided
from labkit.analysis.power import detectable_pct, run_sd
from labkit.analysis.values import Row, complete_blocks, log_values


@dataclass(frozen=True)
class Levels:
    """What the design fixed beforehand: runs per block, alpha, margin (percent)."""

    runs: int
    alpha: float
    margin_pct: float


@dataclass(frozen=True)
class Comparison:
    """What the runs say about one arm in one row; None is unknown.

    ``effect_pct`` is above 0 where the metric is larger. ``sd``: between runs, log scale.
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


def compare_arm(
    rows: Sequence[Row], arm: str, baseline: str, levels: Levels, arms_tested: int = 1
) -> list[Comparison]:
    """Compare ``arm`` with ``baseline`` in every row.

    p-values are adjusted over the rows of the primary metric as one family, over all other
    metrics as another (step-down max-T), and for ``arms_tested`` arms (times their number,
    C. E. Bonferroni): their relabellings are not shared.
    """
    found: dict[int, Comparison] = {i: Comparison(arm, baseline) for i in range(len(rows))}
    for blocks, members in _families(rows, arm, baseline, levels.runs):
        data = [_arms(rows[i], arm, baseline, blocks) for i in members]
        base = np.stack([pair[0] for pair in data], axis=2)
        other = np.stack([pair[1] for pair in data], axis=2)
        units = pooled(base, other)
        labels = relabellings(len(blocks), levels.runs)
        statistics = labels.mean_differences(units)
        adjusted = max_t(standardised(statistics, units, len(blocks)))
        for column, index in enumerate(members):
            found[index] = _compare(
                rows[index], data[column], statistics[:, column], levels,
                Comparison(arm, baseline, p_adjusted=min(1.0, arms_tested * adjusted[column])),
            )  # fmt: skip
    return [found[i] for i in range(len(rows))]


def family_statistics(
    rows: Sequence[Row], arm: str, baseline: str, runs: int
) -> Iterator[tuple[list[int], Floats]]:
    """Give each family of primary rows with its standardised statistics [relabellings, rows]."""
    for blocks, members in _families(rows, arm, baseline, runs):
        if all(rows[i].primary for i in members):
            data = [_arms(rows[i], arm, baseline, blocks) for i in members]
            units = pooled(
                np.stack([pair[0] for pair in data], axis=2),
                np.stack([pair[1] for pair in data], axis=2),
            )
            labels = relabellings(len(blocks), runs)
            yield members, standardised(labels.mean_differences(units), units, len(blocks))


def _families(
    rows: Sequence[Row], arm: str, baseline: str, runs: int
) -> list[tuple[tuple[int, ...], list[int]]]:
    """Group the rows that can be compared by primary or not, and by their blocks."""
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for index, row in enumerate(rows):
        if row.metric is None or row.skipped is not None or not row.positive:
            continue
        blocks = complete_blocks(row, (baseline, arm), runs)
        if blocks:
            groups.setdefault((row.primary, blocks), []).append(index)
    return [(blocks, members) for (_, blocks), members in groups.items()]


def _arms(row: Row, arm: str, baseline: str, blocks: Sequence[int]) -> tuple[Floats, Floats]:
    return log_values(row, baseline, blocks), log_values(row, arm, blocks)


def _compare(
    row: Row, data: tuple[Floats, Floats], statistics: Floats, levels: Levels, start: Comparison
) -> Comparison:
    base, other = data
    blocks = len(base)
    points = breakpoints(statistics, relabellings(blocks, levels.runs))
    limits = points.interval(levels.alpha) if levels.alpha > 0 else None
    sd = run_sd(base, other)
    sign = 1.0 if row.better == "higher" else -1.0
    better = sign * (other.mean(axis=1) - base.mean(axis=1)) > 0
    return Comparison(
        arm=start.arm,
        baseline=start.baseline,
        effect_pct=percent(hodges_lehmann(base, other)),
        ci_pct=None if limits is None else (percent(limits[0]), percent(limits[1])),
        p=two_sided(statistics),
        p_adjusted=start.p_adjusted,
        p_floor=smallest_p(blocks, levels.runs),
        mde_pct=None if sd is None else detectable_pct(sd, blocks, levels.runs, levels.alpha),
        wins=int(np.count_nonzero(better)),
        blocks=blocks,
        sd=sd,
        equivalence=equivalence(points, levels.margin_pct, levels.alpha),
    )
