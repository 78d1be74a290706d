"""What a design can see: the smallest detectable effect, and the blocks that would see one.

With run-to-run standard deviation ``s`` on the log scale, ``b`` blocks of ``r`` runs of
each arm give the mean difference the standard error ``s sqrt(2 / (b r))``. An effect is
called detectable when the verdict's own test, adjusted for the family, finds it in 80 of
100 studies: it is that many standard errors at which Student's noncentral t, with the
``b (2 r - 1) - 1`` degrees of freedom that blocks and arms leave, exceeds the critical value
with probability 0.8 (J. Cohen 1988, section 2.4).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import nctdtrinc, stdtrit

from labkit.analysis.statistics.effect_size import to_log_ratio, to_percent
from labkit.analysis.statistics.permutation_test import Floats, min_p

POWER = 0.8
MAX_BLOCKS = 1000
MINUTE_S = 60.0
MINUTE_ALPHA = 0.05


def between_run_sd(baseline: Floats, arm: Floats) -> float | None:
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
    left = degrees_of_freedom(*baseline.shape)
    return math.sqrt(float((residual**2).sum()) / left) if left > 0 else None


def degrees_of_freedom(blocks: int, runs: int) -> int:
    """Return the degrees of freedom that blocks and arms leave."""
    return blocks * (2 * runs - 1) - 1


def mde_pct(sd: float, blocks: int, runs: int, alpha_row: float) -> float | None:
    """Return the effect (percent) that 80 of 100 studies see; None where none can be.

    ``alpha_row`` is the level that the row alone is tested at: what is left to it where a
    family of rows and arms shares alpha (:func:`.multiplicity.per_row_alphas`).
    """
    left = degrees_of_freedom(blocks, runs)
    if left < 1 or not 0 < alpha_row < 1:
        return None
    critical = stdtrit(left, 1 - alpha_row / 2)
    away = float(nctdtrinc(left, 1 - POWER, critical))
    return to_percent(away * sd * math.sqrt(2.0 / (blocks * runs)))


def single_row_mde_pct(sd: float, blocks: int, runs: int, alpha: float) -> float | None:
    """Return :func:`mde_pct` of a row alone; None also where no p can be as small as alpha."""
    return None if min_p(blocks, runs) > alpha else mde_pct(sd, blocks, runs, alpha)


def one_minute_mde_pct(sd: float, block_s: float, runs: int) -> float | None:
    """Return what a row alone sees at alpha 0.05 in one minute of blocks of ``block_s`` seconds.

    Percent, as in :func:`single_row_mde_pct`; None where a minute holds too few blocks.
    """
    return single_row_mde_pct(sd, int(MINUTE_S // block_s), runs, MINUTE_ALPHA)


def min_blocks_to_claim(runs: int) -> int:
    """Return the fewest blocks that support a claim: 3 of 2 runs of each arm, 6 of 1."""
    return 6 if runs == 1 else 3


def blocks_needed(sd: float, runs: int, alpha: float, effect_pct: float) -> int | None:
    """Return the smallest number of blocks that sees ``effect_pct``; None above 1,000.

    ``alpha``: of the row alone, as in :func:`single_row_mde_pct`. ``effect_pct`` may have either
    sign; a decrease is judged by its log size.
    """
    target = to_percent(abs(to_log_ratio(effect_pct)))
    low, high = 1, MAX_BLOCKS

    def sees(blocks: int) -> bool:
        smallest = single_row_mde_pct(sd, blocks, runs, alpha)
        return smallest is not None and smallest <= target

    if target <= 0 or not sees(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sees(middle) else (middle + 1, high)
    return low
