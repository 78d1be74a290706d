"""What a design can see: the smallest detectable effect, and the blocks that would see one.

With run-to-run standard deviation ``s`` on the log scale, ``b`` blocks of ``r`` runs of
each arm give the mean difference the standard error ``s sqrt(2 / (b r))``. An effect is
called detectable when a two-sided test at ``alpha`` finds it in 80 of 100 studies:
``(t[1 - alpha/2] + t[0.8]) * standard error`` (J. Cohen 1988, section 2.4, with Student's
t for the ``b (2 r - 1) - 1`` degrees of freedom that are left after blocks and arms).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import stdtrit

from labkit.analysis.effect import log_ratio, percent
from labkit.analysis.permutation import Floats, smallest_p

POWER = 0.8
MOST_BLOCKS = 1000


def run_sd(baseline: Floats, arm: Floats) -> float | None:
    """Estimate the standard deviation between runs, block and arm effects taken out.

    Parameters
    ----------
    baseline, arm : float64 [blocks, runs]

    Returns
    -------
    float or None
        Log scale; None where no degree of freedom is left.
    """
    both = np.concatenate([baseline, arm], axis=1)
    residual = both - both.mean(axis=1, keepdims=True)
    runs = baseline.shape[1]
    half = (residual[:, runs:].mean() - residual[:, :runs].mean()) / 2.0
    residual = residual - np.repeat([-half, half], runs)
    freedom = _freedom(*baseline.shape)
    return math.sqrt(float((residual**2).sum()) / freedom) if freedom > 0 else None


def _freedom(blocks: int, runs: int) -> int:
    return blocks * (2 * runs - 1) - 1


def detectable_pct(sd: float, blocks: int, runs: int, alpha: float) -> float | None:
    """Give the smallest effect (percent) seen with 80 % power; None where none can be."""
    freedom = _freedom(blocks, runs)
    if freedom < 1 or smallest_p(blocks, runs) > alpha:
        return None
    quantiles = stdtrit(freedom, 1 - alpha / 2) + stdtrit(freedom, POWER)
    return percent(float(quantiles) * sd * math.sqrt(2.0 / (blocks * runs)))


def blocks_needed(sd: float, runs: int, alpha: float, effect_pct: float) -> int | None:
    """Give the smallest number of blocks that sees ``effect_pct``; None above 1,000.

    ``effect_pct`` may have either sign; a decrease is judged by its log size.
    """
    target = percent(abs(log_ratio(effect_pct)))
    low, high = 1, MOST_BLOCKS

    def sees(blocks: int) -> bool:
        smallest = detectable_pct(sd, blocks, runs, alpha)
        return smallest is not None and smallest <= target

    if target <= 0 or not sees(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sees(middle) else (middle + 1, high)
    return low
