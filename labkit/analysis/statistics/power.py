"""Power of a design: its smallest detectable effect, and the blocks that an effect needs.

With run-to-run standard deviation ``sigma`` on the log scale, the mean difference over ``b``
blocks of ``r`` runs per arm has the standard error ``sigma sqrt(2 / (b r))``. A study estimates
``sigma`` by ``s``, with ``b (2 r - 1) - 1`` degrees of freedom, and its test detects an effect
above ``critical`` estimated standard errors. The minimum detectable effect (MDE) is ``k`` standard
errors as estimated, such that 80 of 100 *other* studies of the same design detect it. Their own
estimates vary, and so does the one from which the MDE is computed: with independent ``s1`` and
``s2``, and ``z`` of the standard normal distribution, ``P(z + k s1 / sigma > critical s2 / sigma)
= 0.8``. An MDE from noise taken as known (J. Cohen 1988, section 2.4) has a power of 50 to 75 %
with 6 to 10 blocks.

The difference of the two sides is nearly normal. Let ``m1`` and ``v1`` be the mean and variance of
``s1 / sigma``, and ``m2`` and ``v2`` those of ``s2 / sigma``. Then ``k`` solves ``k m1 - critical
m2 = t_80 sqrt(1 + k^2 v1 + critical^2 v2)``, where ``t_80`` is the 80 % quantile of Student's t. It
replaces the normal quantile because the critical value, which comes from the study's own
relabellings, varies too. The simulated power is 76 to 86 % from 6 blocks of 1 run or 3 blocks of 2
on, with 1 to 10 rows (``tests/analysis/comparison/test_verdict_rates.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import gammaln, stdtrit

from labkit.analysis.statistics.hodges_lehmann import to_log_ratio, to_percent
from labkit.analysis.statistics.permutation_test import Floats, relabellings_counted

POWER = 0.8
MAX_BLOCKS = 1000
MIN_RUNS_TO_CLAIM = 6  # of each arm
SECONDS_PER_MINUTE = 60.0
ONE_MINUTE_ALPHA = 0.05


def between_run_sd(baseline: Floats, arm: Floats) -> float | None:
    """Estimate the standard deviation between runs after block and arm effects are removed.

    ``baseline``, ``arm``: log values, float64 [blocks, runs]. None if no degree of freedom is left.
    """
    both = np.concatenate([baseline, arm], axis=1)
    residual = both - both.mean(axis=1, keepdims=True)
    runs = baseline.shape[1]
    half = (residual[:, runs:].mean() - residual[:, :runs].mean()) / 2.0
    residual = residual - np.repeat([-half, half], runs)
    df = degrees_of_freedom(*baseline.shape)
    return math.sqrt(float((residual**2).sum()) / df) if df > 0 else None


def degrees_of_freedom(blocks: int, runs: int) -> int:
    """Return the degrees of freedom that remain after block and arm effects are removed."""
    return blocks * (2 * runs - 1) - 1


def detectable_errors(critical: float, df: int, sd_df: int | None = None) -> float | None:
    """Return the effect, in estimated standard errors, that 80 of 100 studies detect, or None.

    ``critical``: a study detects an effect if its estimate exceeds this many estimated standard
    errors. ``df``: degrees of freedom of these studies' estimates of noise. ``sd_df``: those of the
    estimate from which the effect is computed; ``df`` by default. None if there are too few.
    """
    if min(df, df if sd_df is None else sd_df) < 1:
        return None
    mean, sd_mean = _mean_of_sd(df), _mean_of_sd(df if sd_df is None else sd_df)
    t = float(stdtrit(df, POWER))
    # (k sd_mean - critical mean)^2 = t^2 (1 + k^2 (1 - sd_mean^2) + critical^2 (1 - mean^2))
    square = sd_mean**2 - t**2 * (1.0 - sd_mean**2)
    half = critical * mean * sd_mean
    constant = (critical * mean) ** 2 - t**2 * (1.0 + critical**2 * (1.0 - mean**2))
    return None if square <= 0.0 else (half + math.sqrt(half**2 - square * constant)) / square


def _mean_of_sd(df: int) -> float:
    """Return the mean of an estimated standard deviation over the true one (chi distribution)."""
    return math.sqrt(2.0 / df) * math.exp(gammaln((df + 1) / 2.0) - gammaln(df / 2.0))


def mde_pct(
    sd: float, blocks: int, runs: int, alpha_row: float, sd_df: int | None = None
) -> float | None:
    """Return the smallest effect (percent) that 80 of 100 studies detect, or None.

    ``sd``: estimated standard deviation between runs, log scale. ``alpha_row``: the row's own level
    in a family of rows and arms that shares alpha (:func:`.multiple_comparisons.per_row_alphas`).
    ``sd_df``: degrees of freedom of ``sd``; by default those that a study of this design has. None
    if ``alpha_row`` is not between 0 and 1, or if no degree of freedom is left.
    """
    df = degrees_of_freedom(blocks, runs)
    if df < 1 or not 0 < alpha_row < 1:
        return None
    errors = detectable_errors(float(stdtrit(df, 1 - alpha_row / 2)), df, sd_df)
    return None if errors is None else to_percent(errors * sd * math.sqrt(2.0 / (blocks * runs)))


def attained_alpha(blocks: int, runs: int, alpha: float) -> float:
    """Return the level of Student's t that is as strict as a row's permutation test, or 0.0.

    Of ``n`` relabellings, the test may count ``k = 2 floor(alpha n / 2)`` against rejecting, so its
    level is ``k / n``. Two of them always count: the observed one and its mirror image. The result
    is ``(k - 1) / n``, midway between ``k / n`` and the next smaller level, ``(k - 2) / n``. It is
    0.0 if p cannot reach ``alpha``.
    """
    n = relabellings_counted(blocks, runs)
    k = 2 * math.floor(alpha * n / 2.0 + 1e-9)
    return (k - 1) / n if k else 0.0


def ranked_alpha(blocks: int, runs: int, alpha: float) -> float:
    """Return the level of Student's t at which one setting of a sweep is told from a better one.

    The test is one-sided, and its relabellings of all settings at once reach any p
    (:mod:`.best_arm`). The result is 0.0 if there are too few blocks for a claim.
    """
    return 2.0 * alpha if blocks >= min_blocks_to_claim(runs) else 0.0


def alpha_share(alpha_row: float, blocks: int, runs: int, alpha: float) -> float:
    """Return the share of ``alpha`` that a row with the level ``alpha_row`` has in its family.

    The share depends on the family's rows and arms, but not on the design's number of blocks.
    """
    attained = attained_alpha(blocks, runs, alpha)
    return min(1.0, alpha_row / attained) if attained > 0.0 else 1.0


def single_row_mde_pct(
    sd: float,
    blocks: int,
    runs: int,
    alpha: float,
    share: float = 1.0,
    sd_df: int | None = None,
    level: Callable[[int, int, float], float] = attained_alpha,
) -> float | None:
    """Return :func:`mde_pct` of a planned study, or None if p cannot reach ``alpha``.

    ``share`` is the share of its family's alpha that the row gets: 1.0 if it is tested alone.
    ``level``: :func:`ranked_alpha` for settings that are ranked.
    """
    return mde_pct(sd, blocks, runs, share * level(blocks, runs, alpha), sd_df)


def one_minute_mde_pct(
    sd: float, block_s: float, runs: int, sd_df: int | None = None
) -> float | None:
    """Return the smallest effect (percent) that a row's test detects in one minute, or None.

    Alpha is 0.05, and a block takes ``block_s`` seconds. None if a minute holds too few blocks.
    ``sd_df`` is as in :func:`mde_pct`.
    """
    blocks = int(SECONDS_PER_MINUTE // block_s)
    if blocks < 1:
        return None
    return single_row_mde_pct(sd, blocks, runs, ONE_MINUTE_ALPHA, sd_df=sd_df)


def min_blocks_to_claim(runs: int) -> int:
    """Return the number of blocks that a claim needs: as many as have 6 runs of each arm."""
    return -(-MIN_RUNS_TO_CLAIM // runs)


def blocks_needed(
    sd: float,
    runs: int,
    alpha: float,
    effect_pct: float,
    share: float = 1.0,
    sd_df: int | None = None,
    level: Callable[[int, int, float], float] = attained_alpha,
) -> int | None:
    """Return the smallest number of blocks that detects ``effect_pct``, or None above 1,000.

    The other arguments are those of :func:`single_row_mde_pct`. ``effect_pct`` may have either
    sign; a decrease is judged by the size of its log ratio.
    """
    target = to_percent(abs(to_log_ratio(effect_pct)))
    low, high = 1, MAX_BLOCKS

    def detects(blocks: int) -> bool:
        mde = single_row_mde_pct(sd, blocks, runs, alpha, share, sd_df, level)
        return mde is not None and mde <= target

    if target <= 0 or not detects(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if detects(middle) else (middle + 1, high)
    return low
