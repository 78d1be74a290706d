"""Difference in differences of two studies: did an arm's effect change?

The runs of the two studies were never interleaved, so no relabelling may move a run from one
study to the other: whatever the machine did to a whole study would look like a change of the
code. Within its blocks, each study did randomise which runs are the arm's and which are the
baseline's. So the estimand is the difference of differences on the log scale: "arm minus
baseline" in the new study less "arm minus baseline" in the old one. Anything that slows a whole
study cancels, whether by 15 % or by 50 %.

The test relabels both studies at once, each within its blocks. Under the hypothesis "the effect
changed by ``d``", one unknown remains: the arm's effect itself. It is estimated under that
hypothesis from both studies, weighted by their precision, and subtracted before relabelling
(D. Freedman and D. Lane, 1983, on residuals of the reduced model). All later steps are linear in
``d``, so the interval inverts the test through its breakpoints, as in :mod:`.hodges_lehmann`.

The machine probe times fixed kernels in each run's process before the arm is loaded. In each study
it is regressed out of the runs' values, within blocks and anew at every ``d`` (P. R. Rosenbaum,
2002, *Statistical Science* 17). The labels were randomised independently of the probe and the
noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from labkit.analysis.statistics.hodges_lehmann import to_percent
from labkit.analysis.statistics.permutation_test import (
    MAX_ENUMERATED,
    N_RESAMPLES,
    RESAMPLING_SEED,
    Floats,
    pool_by_block,
    relabellings,
    upper_tail_p,
)
from labkit.analysis.statistics.power import detectable_errors
from labkit.analysis.statistics.probe_adjustment import MIN_SUM_OF_SQUARES

MIN_RESIDUAL_DF = 8  # with fewer degrees of freedom, fitting the probe adds noise


@dataclass(frozen=True)
class StudyEffect:
    """An arm's effect in one study, on the log scale, under every relabelling.

    ``null_distribution``, float64 [relabellings], holds the estimates; element 0 is the observed
    one. ``label_correlation``, float64 [relabellings], is the share of a true effect that each
    relabelling would report; element 0 is 1. ``variance`` is the variance of the estimate, with
    ``degrees_of_freedom`` degrees of freedom.
    """

    null_distribution: Floats
    label_correlation: Floats
    variance: float
    degrees_of_freedom: int


def estimate_effect(
    baseline: Floats, arm: Floats, probe: tuple[Floats, Floats] | None
) -> StudyEffect:
    """Estimate an arm's effect in one study under all its relabellings.

    ``baseline``, ``arm``: log values, float64 [blocks, runs]. ``probe``: log probes of the
    baseline's and of the arm's runs, or None if a run has no probe.
    """
    blocks, runs = baseline.shape
    labels = relabellings(blocks, runs)
    is_arm = np.tile(np.repeat([0.0, 1.0], runs), blocks)
    df = blocks * (2 * runs - 1) - 1
    columns = np.stack([pool_by_block(baseline, arm), is_arm], axis=1)
    columns = _centred(columns, blocks)
    if probe is not None and df - 1 >= MIN_RESIDUAL_DF:
        deviations = _centred(pool_by_block(*probe)[:, None], blocks)[:, 0]
        squares = float(deviations @ deviations)
        if squares > MIN_SUM_OF_SQUARES:  # 0 if the arms share a process and its probe
            columns = columns - np.outer(deviations, deviations @ columns) / squares
            df -= 1
    values, indicator = columns.T  # the blocks' means and the probe are removed from both
    indicator_squares = float(indicator @ indicator)
    differences = labels.mean_differences(columns)
    # The share of a true effect that the observed labels report: 1, or less without the probe.
    share = float(differences[0, 1])
    residual = values - indicator * float(values @ indicator) / indicator_squares
    noise = float(residual @ residual) / df if df > 0 else math.nan
    return StudyEffect(
        null_distribution=differences[:, 0] / share,
        label_correlation=differences[:, 1] / share,
        variance=noise / indicator_squares,
        degrees_of_freedom=df,
    )


def _centred(columns: Floats, blocks: int) -> Floats:
    """Subtract the block means from columns, float64 [2 * runs * blocks, columns]."""
    by_block = columns.reshape(blocks, -1, columns.shape[1])
    centred: Floats = by_block - by_block.mean(axis=1, keepdims=True)
    return centred.reshape(columns.shape)


@dataclass(frozen=True)
class EffectChange:
    """The change of an arm's effect from an old study to a new one, under joint relabellings.

    ``null_distribution`` and ``label_correlation`` are as in :class:`StudyEffect`. If ``exact``,
    they cover all joint relabellings, otherwise a sample that includes the observed one.
    """

    null_distribution: Floats
    label_correlation: Floats
    exact: bool
    variance: float
    degrees_of_freedom: int

    @property
    def count(self) -> int:
        return len(self.null_distribution)

    @property
    def estimate(self) -> float:
        """Estimated change on the log scale."""
        return float(self.null_distribution[0])

    @property
    def p(self) -> float:
        """Two-sided p of "the effect did not change": twice the smaller tail, at most 1."""
        tails = upper_tail_p(self.null_distribution), upper_tail_p(-self.null_distribution)
        return min(1.0, 2.0 * min(tails))

    @property
    def smallest_p(self) -> float:
        """Smallest two-sided p that these blocks can give."""
        return min(1.0, 2.0 / self.count)

    def mde_pct(self, alpha: float) -> float | None:
        """Return the smallest change (percent) detectable at ``alpha`` with 80 % power.

        None if there are no degrees of freedom or p cannot reach ``alpha``.
        """
        df = self.degrees_of_freedom
        if df < 1 or self.smallest_p > alpha:
            return None
        errors = detectable_errors(float(stdtrit(df, 1 - alpha / 2)), df)
        return None if errors is None else to_percent(errors * math.sqrt(self.variance))


def effect_change(old: StudyEffect, new: StudyEffect) -> EffectChange:
    """Return the change of an arm's effect from an old study to a new one."""
    before, after, exact = _pairs(len(old.null_distribution), len(new.null_distribution))
    both = old.variance + new.variance
    # The new study's share of the precision; a half even if a variance is unknown (NaN).
    weight = old.variance / both if both > 0 else 0.5
    common = (1.0 - weight) * old.null_distribution[0] + weight * new.null_distribution[0]
    old_residual, new_residual = (
        e.null_distribution - common * e.label_correlation for e in (old, new)
    )
    return EffectChange(
        null_distribution=new_residual[after] - old_residual[before],
        label_correlation=(1.0 - weight) * new.label_correlation[after]
        + weight * old.label_correlation[before],
        exact=exact,
        variance=both,
        degrees_of_freedom=old.degrees_of_freedom + new.degrees_of_freedom,
    )


@lru_cache(maxsize=8)
def _pairs(old: int, new: int) -> tuple[NDArray[np.intp], NDArray[np.intp], bool]:
    """Return pairs of the two studies' relabellings.

    The result is (indices into the old study, indices into the new study, whether they are all
    pairs). The first pair, (0, 0), is the observed one. If there are more than 300,000 pairs,
    100,000 are drawn at random.
    """
    if old * new <= MAX_ENUMERATED:
        before, after = np.divmod(np.arange(old * new), new)
        return before, after, True
    rng = np.random.default_rng([RESAMPLING_SEED, old, new])
    before, after = rng.integers([[old], [new]], size=(2, N_RESAMPLES))
    before[0] = after[0] = 0
    return before, after, False
