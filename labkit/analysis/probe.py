"""Adjustment by the arm-blind probe.

The probe times fixed kernels in each process before the arm's path is loaded. Its part of
the runs' noise is taken out by the regression through block means, ``theta = sum(dv dp) /
sum(dp^2)`` over the runs' deviations from their block's mean. The labels do not enter, so
``theta`` is the same under every relabelling and the permutation test stays exact; with
pairs it is ``sum(D P) / sum(P^2)``, invariant under sign flips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.analysis.permutation import Floats


@dataclass(frozen=True)
class Adjustment:
    """Log values without the probe's part, float64 [blocks, units], and its ``theta``."""

    values: Floats
    theta: float


def adjust(values: Floats, probe: Floats) -> Adjustment | None:
    """Take the probe's part out of log values, both float64 [blocks, units].

    Give None where the probe does not vary within the blocks.
    """
    dv = values - values.mean(axis=1, keepdims=True)
    dp = probe - probe.mean(axis=1, keepdims=True)
    squares = float((dp**2).sum())
    if squares < 1e-24:
        return None
    theta = float((dv * dp).sum()) / squares
    return Adjustment(values=values - theta * dp, theta=theta)


def noise_correlation(values: Floats, probe: Floats) -> float:
    """Correlate value and probe over what blocks and arms leave over, -1 to 1.

    Parameters
    ----------
    values, probe : float64 [arms, blocks, runs]
        Of several arms; an effect of an arm is not taken for a correlation.
    """
    left = []
    for table in (values, probe):
        rest = table - table.mean(axis=(0, 2), keepdims=True)
        left.append(rest - rest.mean(axis=(1, 2), keepdims=True))
    squares = float((left[0] ** 2).sum()) * float((left[1] ** 2).sum())
    return float((left[0] * left[1]).sum()) / float(np.sqrt(squares)) if squares > 1e-40 else 0.0
