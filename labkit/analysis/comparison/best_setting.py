"""The answer to a sweep: each primary row's best setting, and the settings that may be as good.

A setting is a combination of the sweep's values. Each setting is an arm, and all arms' runs share
random blocks. So settings are compared as arms are: by one number per run, on the log scale, within
blocks. The statistics are those of :mod:`labkit.analysis.statistics.best_arm`; alpha is
divided among the primary rows but estimates, of which nothing is claimed. Computed values have no
noise, so the best of them is the best.
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
from labkit.analysis.comparison.verdict import too_few_blocks
from labkit.analysis.model.cell_model import BestInRow
from labkit.analysis.number_format import round_digits
from labkit.analysis.statistics.best_arm import possibly_best, winner
from labkit.analysis.statistics.hodges_lehmann import to_percent

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis


def best_settings(analysis: CellAnalysis) -> list[BestInRow]:
    """Return the best setting of every measured primary row of a sweep."""
    rows = [row for row in analysis.rows if row.primary and row.skipped is None]
    num_tested = sum(row.case not in analysis.data.estimates_at(None) for row in rows)
    return [_best_setting(analysis, row, num_tested) for row in rows]


def _best_setting(analysis: CellAnalysis, row: MetricRow, num_tested: int) -> BestInRow:
    data, criteria = analysis.data, analysis.data.criteria_of(row.case)
    runs = criteria.runs
    arms = [data.baseline, *data.treatment_arms]
    excluded = {arm: reason for arm in arms if (reason := _obstacle(analysis, row, arm))}
    valid = [arm for arm in arms if arm not in excluded and arm not in data.dropped]
    blocks = complete_blocks(row, valid, runs) if valid else ()
    best = BestInRow(
        row.case, row.metric, row.unit, row.better, excluded=excluded, dropped=dict(data.dropped)
    )
    measured = [arm for arm in arms if arm not in excluded]
    if row.is_computed and len(measured) > 1:
        values = {arm: row.arms[arm][0].value for arm in measured}
        return _best_computed(best, values, data.baseline)
    if data.baseline in excluded or len(valid) < 2 or not blocks:
        reason = excluded.get(data.baseline, "fewer than two settings have results")
        return replace(best, withheld=reason)
    compared = replace(row, arms={arm: row.arms[arm] for arm in measured})
    logs = np.stack([log_values(compared, arm, blocks) for arm in valid], axis=2)
    values = _comparable_values(compared, measured, runs)
    best = replace(best, values={arm: round_digits(value) for arm, value in values.items()})
    sign = 1.0 if row.better == "higher" else -1.0
    withheld = too_few_blocks(len(blocks), runs) or criteria.withheld_reason
    if withheld is not None:  # an estimate, without an interval or a claim
        order = np.argsort(-(sign * logs).mean(axis=(0, 1)), kind="stable")
        first, other = valid[int(order[0])], valid[0 if order[0] else int(order[1])]
        effect_pct = round_digits(100.0 * (values[first] / values[other] - 1.0))
        return replace(best, best=first, reference=other, effect_pct=effect_pct, withheld=withheld)
    alpha = criteria.alpha / num_tested
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
    causes = analysis.causes(arm, row)
    if causes:
        return "; ".join(causes)
    if not row.arms.get(arm):
        return "not measured"
    if row.is_computed or row.positive:
        return None
    # Only ratios are compared. Where less is better, a setting with a value of 0 may be the best.
    others = () if row.better == "higher" else row.arms
    zeros = (one for one in (arm, *others) if not replace(row, arms={one: row.arms[one]}).positive)
    zero = next(zeros, None)
    of = "" if zero == arm else f" of {zero}"
    return None if zero is None else f"a value{of} is not above 0"


def _best_computed(best: BestInRow, values: dict[str, float], baseline: str) -> BestInRow:
    order = sorted(values, key=values.__getitem__, reverse=best.better == "higher")
    top = values[order[0]]
    equal = tuple(arm for arm in order if values[arm] == top)
    others = [arm for arm in order if arm not in equal] or order[1:]
    reference = baseline if baseline in others else others[0]
    base = values[reference]
    return replace(
        best,
        values={arm: round_digits(value) for arm, value in values.items()},
        best=order[0],
        reference=reference,
        effect_pct=round_digits(100.0 * (top / base - 1.0)) if base > 0 else None,
        possibly_best=equal,
    )


def _comparable_values(row: MetricRow, arms: Sequence[str], runs: int) -> dict[str, float]:
    """Return, by arm, the baseline's median times the arm's ratio to the baseline within blocks.

    The baseline is the first of ``arms``. An arm is compared with the baseline in the blocks that
    both of them completed.
    """
    baseline = arm_values(row.arms[arms[0]]).median
    values = {}
    for arm in arms:
        if blocks := complete_blocks(row, (arms[0], arm), runs):
            base, other = (log_values(row, name, blocks).mean() for name in (arms[0], arm))
            values[arm] = float(baseline * np.exp(other - base))
    return values


def is_decided(settings: Sequence[BestInRow]) -> bool:
    """Return whether the best setting of every row that is tested is known."""
    tested = tested_rows(settings)
    return bool(tested) and all(one.is_decided for one in tested)


def tested_rows(settings: Sequence[BestInRow]) -> list[BestInRow]:
    """Return the rows that are not mere estimates, because ``design.time`` is too short."""
    return [one for one in settings if one.withheld != OUT_OF_REACH]


def setting_text(arm: str) -> str:
    """Return a setting in words: ``order=decode_first, threads=2``."""
    return arm.replace(",", ", ")
