"""The objective of a cell: the number that a search over options maximises or minimises.

Hydra's sweepers for Optuna and Ax choose each trial by the objectives of the trials before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.analysis.comparison.observations import arm_values

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellAnalysis


def objective(analysis: CellAnalysis) -> float | None:
    """Return a cell's objective, or None if it has no measured value.

    The objective is the effect of the first arm under test on the first primary metric, in percent.
    Without an arm under test, it is the baseline's median of this metric, in the metric's unit.
    Several cases are combined by the geometric mean (of ratios to the baseline, for an effect).
    """
    primary = [
        index
        for index, row in enumerate(analysis.rows)
        if row.primary and row.skipped is None and row.metric is not None
    ]
    if not primary:
        return None
    metric = analysis.rows[primary[0]].metric
    rows = [index for index in primary if analysis.rows[index].metric == metric]
    arms = analysis.data.treatment_arms
    if arms:
        effects = [analysis.comparisons[index][arms[0]].effect_pct for index in rows]
        ratios = [None if effect is None else 1 + effect / 100 for effect in effects]
        ratio = _geometric_mean(ratios)
        return None if ratio is None else 100 * (ratio - 1)
    baseline = analysis.data.baseline
    return _geometric_mean(
        [arm_values(analysis.rows[index].arms.get(baseline, [])).median for index in rows]
    )


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean, or None if a value is absent or not positive."""
    positive = [value for value in values if value is not None and value > 0]
    return float(np.exp(np.mean(np.log(positive)))) if len(positive) == len(values) else None
