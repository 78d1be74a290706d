"""Power of a design: its smallest detectable effect, and the blocks that an effect needs.

With run-to-run standard deviation ``s`` on the log scale, ``b`` blocks of ``r`` runs of each
arm give the mean difference the standard error ``s sqrt(2 / (b r))``. The minimum detectable
effect (MDE) is the one that the verdict's own test, adjusted for the family, detects in 80 of
100 studies. In standard errors, it is the noncentrality at which Student's noncentral t exceeds
the critical value with probability 0.8 (J. Cohen 1988, section 2.4). Blocks and arms leave t
``b (2 r - 1) - 1`` degrees of freedom.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import nctdtrinc, stdtrit

from labkit.analysis.statistics.effect_size import to_log_ratio, to_percent
from labkit.analysis.statistics.permutation_test import Floats, min_p

POWER = 0.8
MAX_BLOCKS = 1000
SECONDS_PER_MINUTE = 60.0
ONE_MINUTE_ALPHA = 0.05


def between_run_sd(baseline: Floats, arm: Floats) -> float | None:
    """Estimate the standard deviation between runs after block and arm effects are removed.

    Parameters
    ----------
    baseline, arm : float64 [blocks, runs]

    Returns
    -------
    float or None
        On the log scale; None if no degree of freedom is left.
    """
    both = np.concatenate([baseline, arm], axis=1)
    residual = both - both.mean(axis=1, keepdims=True)
    runs = baseline.shape[1]
    half = (residual[:, runs:].mean() - residual[:, :runs].mean()) / 2.0
    residual = residual - np.repeat([-half, half], runs)
    df = degrees_of_freedom(*baseline.shape)
    return math.sqrt(float((residual**2).sum()) / df) if df > 0 else None


def degrees_of_freedom(blocks: int, runs: int) -> int:
    """Return the degrees of freedom that blocks and arms leave."""
    return blocks * (2 * runs - 1) - 1


def mde_pct(sd: float, blocks: int, runs: int, alpha_row: float) -> float | None:
    """Return the smallest effect (percent) that 80 of 100 studies detect, or None.

    ``alpha_row`` is the row's own level in a family of rows and arms that shares alpha
    (:func:`.multiple_comparisons.per_row_alphas`). None if that level is not between 0 and 1, or
    if no degree of freedom is left.
    """
    df = degrees_of_freedom(blocks, runs)
    if df < 1 or not 0 < alpha_row < 1:
        return None
    critical = stdtrit(df, 1 - alpha_row / 2)
    standard_errors = float(nctdtrinc(df, 1 - POWER, critical))
    return to_percent(standard_errors * sd * math.sqrt(2.0 / (blocks * runs)))


def single_row_mde_pct(sd: float, blocks: int, runs: int, alpha: float) -> float | None:
    """Return :func:`mde_pct` for a row tested alone, or None if its p cannot reach ``alpha``."""
    return None if min_p(blocks, runs) > alpha else mde_pct(sd, blocks, runs, alpha)


def one_minute_mde_pct(sd: float, block_s: float, runs: int) -> float | None:
    """Return the smallest effect (percent) that a row's test detects in one minute, or None.

    Alpha is 0.05, and a block takes ``block_s`` seconds. None if a minute holds too few blocks.
    """
    return single_row_mde_pct(sd, int(SECONDS_PER_MINUTE // block_s), runs, ONE_MINUTE_ALPHA)


def min_blocks_to_claim(runs: int) -> int:
    """Return the number of blocks that a claim needs: 6 with one run per arm and block, else 3."""
    return 6 if runs == 1 else 3


def blocks_needed(sd: float, runs: int, alpha: float, effect_pct: float) -> int | None:
    """Return the smallest number of blocks that detects ``effect_pct``, or None above 1,000.

    ``alpha`` is the level of a row tested alone, as in :func:`single_row_mde_pct`. ``effect_pct``
    may have either sign; a decrease is judged by the size of its log ratio.
    """
    target = to_percent(abs(to_log_ratio(effect_pct)))
    low, high = 1, MAX_BLOCKS

    def detects(blocks: int) -> bool:
        mde = single_row_mde_pct(sd, blocks, runs, alpha)
        return mde is not None and mde <= target

    if target <= 0 or not detects(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if detects(middle) else (middle + 1, high)
    return low
