"""The answer to a sweep: each primary row's best setting, and the settings that may be as good.

A setting is a combination of the sweep's values. Each setting is an arm, and all arms' runs share
random blocks. So settings are compared as arms are: by one number per run, on the log scale, within
blocks. The statistics are those of :mod:`labkit.analysis.statistics.best_arm`; alpha is
divided among the primary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from labkit.analysis.comparison.arm_comparison import OUT_OF_REACH
from labkit.analysis.comparison.observations import (
    MetricRow,
    arm_values,
    complete_blocks,
    log_values,
)
from labkit.analysis.model.cell_model import BestInRow
from labkit.analysis.number_format import round_digits
from labkit.analysis.statistics.best_arm import possibly_best, winner
from labkit.analysis.statistics.effect_size import to_percent
from labkit.analysis.statistics.power import min_blocks_to_claim
from labkit.config import count_text
from labkit.records.metric_registry import metric_definition

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis


def best_settings(analysis: CellAnalysis) -> list[BestInRow]:
    """Return the best setting of every measured primary row of a sweep."""
    rows = [row for row in analysis.rows if row.primary and row.skipped is None]
    estimates = analysis.data.estimates_at(None)
    tested = sum(row.case not in estimates for row in rows)
    return [_best_setting(analysis, row, tested) for row in rows]


def _best_setting(analysis: CellAnalysis, row: MetricRow, num_rows: int) -> BestInRow:
    data, runs = analysis.data, analysis.data.criteria.runs
    arms = [data.baseline, *data.treatment_arms]
    excluded = {arm: reason for arm in arms if (reason := _obstacle(analysis, row, arm))}
    valid = [arm for arm in arms if arm not in excluded and arm not in data.dropped]
    blocks = complete_blocks(row, valid, runs) if valid else ()
    best = BestInRow(
        row.case, row.metric, row.unit, row.better, excluded=excluded, dropped=dict(data.dropped)
    )
    if data.baseline in excluded or len(valid) < 2 or not blocks:
        reason = excluded.get(data.baseline, "fewer than two settings have results")
        return replace(best, withheld=reason)
    measured = [arm for arm in arms if arm not in excluded]
    compared = replace(row, arms={arm: row.arms[arm] for arm in measured})
    logs = np.stack([log_values(compared, arm, blocks) for arm in valid], axis=2)
    values = _comparable_values(compared, measured, runs)
    best = replace(best, values={arm: round_digits(value) for arm, value in values.items()})
    sign = 1.0 if row.better == "higher" else -1.0
    withheld = _withheld_reason(analysis, row, len(blocks))
    if withheld is not None:  # an estimate, without an interval or a claim
        order = np.argsort(-(sign * logs).mean(axis=(0, 1)), kind="stable")
        first, other = valid[int(order[0])], valid[0 if order[0] else int(order[1])]
        effect_pct = round_digits(100.0 * (values[first] / values[other] - 1.0))
        return replace(best, best=first, reference=other, effect_pct=effect_pct, withheld=withheld)
    alpha = data.criteria.alpha / num_rows
    won = winner(sign * logs, 0, alpha)
    low, high = sorted(sign * limit for limit in won.interval)
    return replace(
        best,
        best=valid[won.arm],
        reference=valid[won.reference],
        effect_pct=round_digits(to_percent(sign * won.difference)),
        ci_low_pct=round_digits(to_percent(low)),
        ci_high_pct=round_digits(to_percent(high)),
        level=round_digits(1.0 - alpha),
        possibly_best=tuple(valid[arm] for arm in possibly_best(sign * logs, alpha)),
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


def _withheld_reason(analysis: CellAnalysis, row: MetricRow, blocks: int) -> str | None:
    criteria = analysis.data.criteria_of(row.case)
    needed = min_blocks_to_claim(criteria.runs)
    if blocks < needed:
        done = count_text(blocks, "block")
        return f"{done} of {criteria.runs}: a claim needs at least {needed}"
    return criteria.withheld_reason


def is_decided(settings: Sequence[BestInRow]) -> bool:
    """Return whether every row that is tested has only one setting left that may be the best."""
    tested = tested_rows(settings)
    return bool(tested) and all(len(one.possibly_best) == 1 for one in tested)


def tested_rows(settings: Sequence[BestInRow]) -> list[BestInRow]:
    """Return the rows that are not mere estimates, because ``design.time`` is too short."""
    return [one for one in settings if one.withheld != OUT_OF_REACH]


def setting_text(arm: str) -> str:
    """Return a setting in words: ``order=decode_first, threads=2``."""
    return arm.replace(",", ", ")
