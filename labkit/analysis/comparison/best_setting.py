"""The answer to a sweep: each primary row's best setting, and the settings that may be as good.

A setting is a combination of the sweep's values. Each setting is an arm, and all arms' runs share
random blocks. So settings are compared as arms are: by one number per run, on the log scale, within
blocks. The statistics are those of :mod:`labkit.analysis.statistics.best_arm`; alpha is
divided among the primary rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from labkit.analysis.comparison.arm_comparison import interval_to_percent
from labkit.analysis.comparison.observations import (
    MetricRow,
    arm_values,
    complete_blocks,
    log_values,
)
from labkit.analysis.model.cell_model import BestInRow
from labkit.analysis.number_format import round_significant
from labkit.analysis.statistics.best_arm import possibly_best, winner
from labkit.analysis.statistics.effect_size import to_percent
from labkit.analysis.statistics.permutation_test import Floats
from labkit.analysis.statistics.power import min_blocks_to_claim
from labkit.config import count_text
from labkit.records.metric_registry import metric_definition

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis


@dataclass(frozen=True)
class BestSetting:
    """The best setting in one row; unknown values are None.

    ``values`` maps each arm to the baseline's median times the arm's ratio to the baseline, as
    estimated within blocks. ``reference`` is the baseline, or the second best arm if the baseline
    is the best. ``effect_pct`` is the difference of the best arm from the reference in percent,
    corrected for having chosen the best. ``ci_pct`` is its interval at confidence level ``level``.
    ``possibly_best`` are the arms that may be the best, ordered from the best mean to the worst.
    ``excluded`` maps each arm without a valid result to the reason. ``dropped`` maps each arm that
    an interim look dropped, because another arm was better, to the number of blocks it ran.
    ``withheld`` is the reason why nothing is claimed and the numbers are only estimates. It is None
    if a claim is made.
    """

    row: MetricRow
    values: Mapping[str, float]
    excluded: Mapping[str, str]
    best: str | None = None
    reference: str | None = None
    effect_pct: float | None = None
    ci_pct: tuple[float, float] | None = None
    level: float | None = None
    possibly_best: tuple[str, ...] = ()
    withheld: str | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)

    def rounded(self) -> BestInRow:
        """Return the setting's part of the model."""
        low, high = self.ci_pct or (None, None)
        return BestInRow(
            case=self.row.case,
            metric=self.row.metric,
            unit=self.row.unit,
            better=self.row.better,
            values={arm: float(f"{value:.10g}") for arm, value in self.values.items()},
            excluded=dict(self.excluded),
            best=self.best,
            reference=self.reference,
            effect_pct=round_significant(self.effect_pct),
            ci_low_pct=round_significant(low),
            ci_high_pct=round_significant(high),
            level=round_significant(self.level),
            possibly_best=self.possibly_best,
            withheld=self.withheld,
            dropped=dict(self.dropped),
        )


def best_settings(analysis: CellAnalysis) -> list[BestSetting]:
    """Return the best setting of every measured primary row of a sweep."""
    rows = [row for row in analysis.rows if row.primary and row.skipped is None]
    return [_best_setting(analysis, row, len(rows)) for row in rows]


def _best_setting(analysis: CellAnalysis, row: MetricRow, num_rows: int) -> BestSetting:
    data, runs = analysis.data, analysis.data.criteria.runs
    arms = [data.baseline, *data.treatment_arms]
    excluded = {arm: reason for arm in arms if (reason := _obstacle(analysis, row, arm))}
    valid = [arm for arm in arms if arm not in excluded and arm not in data.dropped]
    blocks = complete_blocks(row, valid, runs) if valid else ()
    if data.baseline in excluded or len(valid) < 2 or not blocks:
        reason = excluded.get(data.baseline, "fewer than two settings have results")
        return BestSetting(row, {}, excluded, withheld=reason, dropped=data.dropped)
    compared = replace(row, arms={arm: row.arms[arm] for arm in arms if arm not in excluded})
    logs = np.stack([log_values(compared, arm, blocks) for arm in valid], axis=2)
    values = _comparable_values(compared, [arm for arm in arms if arm not in excluded], runs)
    sign = 1.0 if row.better == "higher" else -1.0
    withheld = _withheld_reason(analysis, len(blocks))
    if withheld is not None:
        estimate = _estimate(row, sign * logs, valid, values, excluded, withheld)
        return replace(estimate, dropped=data.dropped)
    alpha = data.criteria.alpha / num_rows
    won = winner(sign * logs, 0, alpha)
    low, high = sorted(sign * limit for limit in won.interval)
    return BestSetting(
        row,
        values,
        excluded,
        best=valid[won.arm],
        reference=valid[won.reference],
        effect_pct=to_percent(sign * won.difference),
        ci_pct=interval_to_percent((low, high)),
        level=1.0 - alpha,
        possibly_best=tuple(valid[arm] for arm in possibly_best(sign * logs, alpha)),
        dropped=data.dropped,
    )


def _obstacle(analysis: CellAnalysis, row: MetricRow, arm: str) -> str | None:
    """Return the reason why an arm has no valid result in a row, or None."""
    causes = analysis.causes(arm, row.metric)
    if causes:
        return "; ".join(causes)
    if not row.arms.get(arm):
        return "not measured"
    zero_is_result = metric_definition(row.metric, row.unit).zero_is_result
    judged = replace(row, arms={arm: row.arms[arm]}) if zero_is_result else row
    return None if judged.positive else "a value is not above 0"


def _comparable_values(row: MetricRow, arms: Sequence[str], runs: int) -> dict[str, float]:
    """Return, by arm, the baseline's median times the arm's ratio to the baseline within blocks.

    The baseline is the first of ``arms``. An arm is compared with the baseline in the blocks that
    both of them completed.
    """
    baseline = arm_values(row.arms[arms[0]]).median
    values = {}
    for arm in arms:
        blocks = complete_blocks(row, (arms[0], arm), runs)
        if blocks:
            pair = (log_values(row, name, blocks) for name in (arms[0], arm))
            base, other = (float(each.mean()) for each in pair)
            values[arm] = float(baseline * np.exp(other - base))
    return values


def _withheld_reason(analysis: CellAnalysis, blocks: int) -> str | None:
    criteria = analysis.data.criteria
    needed = min_blocks_to_claim(criteria.runs)
    if blocks < needed:
        done = count_text(blocks, "block")
        return f"{done} of {criteria.runs}: a claim needs at least {needed}"
    return criteria.withheld_reason


def _estimate(
    row: MetricRow,
    logs: Floats,
    arms: Sequence[str],
    values: Mapping[str, float],
    excluded: Mapping[str, str],
    withheld: str,
) -> BestSetting:
    """Return the best setting so far as an estimate, without an interval or a claim.

    ``logs`` are the log values, float64 [blocks, runs, arms], with the sign that makes larger
    values better. ``withheld`` is the reason why nothing may be claimed.
    """
    order = np.argsort(-logs.mean(axis=(0, 1)), kind="stable")
    best, reference = int(order[0]), 0 if order[0] else int(order[1])
    ratio = values[arms[best]] / values[arms[reference]]
    return BestSetting(
        row,
        values,
        excluded,
        best=arms[best],
        reference=arms[reference],
        effect_pct=100.0 * (ratio - 1.0),
        withheld=withheld,
    )


def is_decided(settings: Sequence[BestSetting]) -> bool:
    """Return whether every row has only one setting left that may be the best."""
    return bool(settings) and all(len(one.possibly_best) == 1 for one in settings)


def setting_text(arm: str) -> str:
    """Return a setting in words: ``order=decode_first, threads=2``."""
    return arm.replace(",", ", ")
