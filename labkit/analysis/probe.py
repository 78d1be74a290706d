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
    """Values with the probe's part taken out, float64 [blocks, units]; its ``theta``;
    ``correlation`` of the deviations, -1 to 1.
    """  # noqa: D205

    values: Floats
    theta: float
    correlation: float


def adjust(values: Floats, probe: Floats) -> Adjustment | None:
    """Take the probe's part out of log values, both float64 [blocks, units].

    Give None where either does not vary within the blocks.
    """
    dv = values - values.mean(axis=1, keepdims=True)
    dp = probe - probe.mean(axis=1, keepdims=True)
    squares_v, squares_p = float((dv**2).sum()), float((dp**2).sum())
    if min(squares_v, squares_p) < 1e-24:
        return None
    product = float((dv * dp).sum())
    theta = product / squares_p
    return Adjustment(
        values=values - theta * dp,
        theta=theta,
        correlation=product / float(np.sqrt(squares_v * squares_p)),
    )
