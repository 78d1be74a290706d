"""Covariate adjustment by the machine probe.

The probe times fixed kernels in each process before the arm is loaded. Every hypothetical effect
``delta`` is tested in three steps. ``delta`` is subtracted from the arm's values. The probe is
regressed out of all values within blocks: ``theta = sum(dv dp) / sum(dp^2)``, where ``dv`` and
``dp`` are the deviations of a run's value and probe from the means of its block. The permutation
test is applied to the residuals. This is the covariance adjustment of P. R. Rosenbaum (2002,
*Statistical Science* 17, section 3). Labels do not enter the fit, so the test is exact if the true
effect is ``delta``.

``theta`` is fitted anew at every ``delta``: fitted once, at 0, it would attribute part of the
effect to the probe. The fit is linear, so the residual is ``e_v - delta e_x``, where ``e_v``
and ``e_x`` are the residuals of the values and of the arm's indicator. Under relabelling ``j``
their mean differences, arm minus baseline, are ``a_j`` and ``c_j``, and the statistic is
``a_j - delta c_j``. The estimate is the ``delta`` at which the observed statistic is 0:
``a_0 / c_0``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.analysis.statistics.permutation_test import (
    Floats,
    pool_by_block,
    relabellings,
    two_sided_p,
)

MIN_SUM_OF_SQUARES = 1e-24


@dataclass(frozen=True)
class ProbeAdjustedEffect:
    """A probe-adjusted effect: log ratio, interval (None if unbounded) and p."""

    effect: float
    interval: tuple[float, float] | None
    p: float


def probe_adjusted(values: Floats, probes: Floats, alpha: float) -> ProbeAdjustedEffect | None:
    """Compare an arm with the baseline after regressing the probe out of the values.

    ``values``, ``probes``: log values and log probes of the baseline and of the arm, float64
    [2, blocks, runs]. None if the probe does not vary within the blocks, or separates the arms
    completely.
    """
    _, blocks, runs = values.shape
    indicator = np.stack([np.zeros((blocks, runs)), np.ones((blocks, runs))])
    deviations = _within(pool_by_block(probes[0], probes[1]), blocks)
    squares = float(deviations @ deviations)
    if squares < MIN_SUM_OF_SQUARES:
        return None
    residuals = []
    for table in (values, indicator):
        within = _within(pool_by_block(table[0], table[1]), blocks)
        residuals.append(within - float(within @ deviations) / squares * deviations)
    labels = relabellings(blocks, runs)
    a, c = labels.mean_differences(np.stack(residuals, axis=1)).T
    if c[0] < 1e-9:
        return None
    low, high = _lower_limit(a, c, alpha), _lower_limit(-a, c, alpha)
    interval = None if low is None or high is None else (low, -high)
    return ProbeAdjustedEffect(effect=float(a[0] / c[0]), interval=interval, p=two_sided_p(a))


def _within(values: Floats, blocks: int) -> Floats:
    """Subtract the block means from values, float64 [2 * runs * blocks]."""
    table = values.reshape(blocks, -1)
    return np.asarray((table - table.mean(axis=1, keepdims=True)).reshape(-1))


def _lower_limit(a: Floats, c: Floats, alpha: float) -> float | None:
    """Return the smallest shift whose one-sided p is above ``alpha / 2``; None if there is none.

    ``a`` and ``c``, float64 [relabellings], are as in the module's docstring. Relabelling ``j`` has
    at least the observed statistic at shifts above the breakpoint ``(a_0 - a_j) / (c_0 - c_j)``. If
    ``c_j`` exceeds ``c_0``, this holds at shifts below that breakpoint instead.
    """
    gap = c[0] - c
    rising, falling = gap > 1e-9, gap < -1e-9
    always = np.count_nonzero(~rising & ~falling & (a >= a[0] - 1e-12 * np.abs(a).max()))
    points = np.concatenate([(a[0] - a[side]) / gap[side] for side in (rising, falling)])
    steps = np.repeat([1, -1], [np.count_nonzero(rising), np.count_nonzero(falling)])
    order = np.argsort(points, kind="stable")
    start = int(always + np.count_nonzero(falling))
    enough = alpha * len(a) / 2.0 + 1e-9
    if start > enough:
        return None
    reached = np.flatnonzero(start + np.cumsum(steps[order]) > enough)
    return float(points[order][reached[0]]) if len(reached) else None


def noise_correlation(values: Floats, probe: Floats) -> float:
    """Return the correlation of values and probe within blocks, -1 to 1.

    The computation ignores which arm a run belongs to. So an arm's effect is noise here: it can
    hide a correlation but not produce one. ``values``, ``probe``: float64 [arms, blocks, runs].
    """
    within = [table - table.mean(axis=(0, 2), keepdims=True) for table in (values, probe)]
    squares = float((within[0] ** 2).sum()) * float((within[1] ** 2).sum())
    return (
        float((within[0] * within[1]).sum()) / float(np.sqrt(squares)) if squares > 1e-40 else 0.0
    )
