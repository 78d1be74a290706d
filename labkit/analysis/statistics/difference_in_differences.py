"""Two studies, each randomised within its own blocks: did an arm's effect change?

Their runs were never interleaved, so no relabelling may move a run from one study to the
other: whatever the machine did to a whole study would look like a change of the code. What
each study did randomise is which of a block's runs are the arm's and which the baseline's.
So the estimand is the difference of differences, "arm minus baseline" now less "arm minus
baseline" then, on the log scale: what slows a whole study cancels, be it 15 % or 50 %.

The test relabels both studies at once, each within its blocks. Under "the effect changed by
``d``" one unknown is left, the effect itself; it is estimated under that hypothesis, from
both studies by their precision, and taken out before relabelling (D. Freedman and D. Lane,
1983, on residuals of the reduced model). All that follows is linear in ``d``, so
the interval inverts the test through its breakpoints, as in :mod:`.effect`.

In each study the runs' noise that goes with the arm-blind probe of the same process is
taken out by a regression through block means, refitted at every ``d`` (P. R. Rosenbaum,
2002, *Statistical Science* 17): the labels are independent of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from labkit.analysis.statistics.effect_size import to_percent
from labkit.analysis.statistics.permutation_test import (
    MAX_ENUMERATED,
    N_RESAMPLES,
    RESAMPLING_SEED,
    Floats,
    pool_by_block,
    relabellings,
    upper_tail_p,
)
from labkit.analysis.statistics.power import POWER

FEWEST_LEFT = 8  # degrees of freedom that the slope must leave, or it costs more than it takes


@dataclass(frozen=True)
class StudyEffect:
    """An arm's effect in one study, on the log scale, as its relabellings see it.

    ``statistics``: float64 [relabellings], the estimate under each; row 0 is what was run.
    ``overlap``: float64 [relabellings], the part of a true effect that each would report
    (row 0: 1). ``variance`` of the estimate, from ``freedom`` degrees of freedom.
    """

    null_distribution: Floats
    label_correlation: Floats
    variance: float
    degrees_of_freedom: int


def estimate_effect(
    baseline: Floats, arm: Floats, probe: tuple[Floats, Floats] | None
) -> StudyEffect:
    """Estimate an arm's effect in one study under all its relabellings.

    Parameters
    ----------
    baseline, arm
        Log values, float64 [blocks, runs].
    probe
        The log probes of the same runs, baseline's and arm's; None where one is unknown.
    """
    blocks, runs = baseline.shape
    labels = relabellings(blocks, runs)
    given = np.tile(np.repeat([0.0, 1.0], runs), blocks)
    freedom = blocks * (2 * runs - 1) - 1
    columns = np.stack([pool_by_block(baseline, arm), given], axis=1)
    columns = _centred(columns, blocks)
    if probe is not None and freedom - 1 >= FEWEST_LEFT:
        slope = _centred(pool_by_block(*probe)[:, None], blocks)[:, 0]
        squares = float(slope @ slope)
        if squares > 1e-24:  # one process with all arms has one probe: nothing to take out
            columns = columns - np.outer(slope, slope @ columns) / squares
            freedom -= 1
    values, shift = columns.T
    statistics = labels.mean_differences(columns)
    own = float(statistics[0, 1])
    rest = values - shift * float(values @ shift) / float(shift @ shift)
    noise = float(rest @ rest) / freedom if freedom > 0 else math.nan
    return StudyEffect(
        null_distribution=statistics[:, 0] / own,
        label_correlation=statistics[:, 1] / own,
        variance=noise / float(shift @ shift),
        degrees_of_freedom=freedom,
    )


def _centred(columns: Floats, blocks: int) -> Floats:
    by_block = columns.reshape(blocks, -1, columns.shape[1])
    centred: Floats = by_block - by_block.mean(axis=1, keepdims=True)
    return centred.reshape(columns.shape)


@dataclass(frozen=True)
class EffectChange:
    """How an arm's effect changed from an old study to a new one, under joint relabellings.

    ``statistics`` and ``overlap`` as in :class:`StudyEffect`. ``exact``: all joint relabellings;
    else draws, what was run among them.
    """

    null_distribution: Floats
    label_correlation: Floats
    exact: bool
    variance: float
    degrees_of_freedom: int

    @property
    def count(self) -> int:
        """How many joint relabellings there are."""
        return len(self.null_distribution)

    @property
    def estimate(self) -> float:
        """The change, log scale."""
        return float(self.null_distribution[0])

    @property
    def p(self) -> float:
        """Two-sided p of "nothing changed": twice the smaller tail, at most 1."""
        return min(
            1.0,
            2.0 * min(upper_tail_p(self.null_distribution), upper_tail_p(-self.null_distribution)),
        )

    @property
    def min_p(self) -> float:
        """The smallest two-sided p that these blocks can reach."""
        return min(1.0, 2.0 / self.count)

    def mde_pct(self, alpha: float) -> float | None:
        """Return the smallest change (percent) seen at ``alpha`` with 80 % power, or None."""
        if self.degrees_of_freedom < 1 or self.min_p > alpha:
            return None
        quantiles = stdtrit(self.degrees_of_freedom, 1 - alpha / 2) + stdtrit(
            self.degrees_of_freedom, POWER
        )
        return to_percent(float(quantiles) * math.sqrt(self.variance))


def effect_change(old: StudyEffect, new: StudyEffect) -> EffectChange:
    """Set an arm's effect in a new study against its effect in an old one."""
    before, after, exact = _pairs(len(old.null_distribution), len(new.null_distribution))
    weight = _weight_of_new(old, new)
    common = (1.0 - weight) * old.null_distribution[0] + weight * new.null_distribution[0]
    was, now = (e.null_distribution - common * e.label_correlation for e in (old, new))
    return EffectChange(
        null_distribution=now[after] - was[before],
        label_correlation=(1.0 - weight) * new.label_correlation[after]
        + weight * old.label_correlation[before],
        exact=exact,
        variance=old.variance + new.variance,
        degrees_of_freedom=old.degrees_of_freedom + new.degrees_of_freedom,
    )


def _weight_of_new(old: StudyEffect, new: StudyEffect) -> float:
    """Return the new study's part in the common effect: its share of the precision."""
    both = old.variance + new.variance
    return old.variance / both if both > 0 else 0.5  # also where a variance is not known


@lru_cache(maxsize=8)
def _pairs(old: int, new: int) -> tuple[NDArray[np.intp], NDArray[np.intp], bool]:
    """Pair the studies' relabellings: all up to 300,000, else 100,000 draws; (0, 0) first."""
    if old * new <= MAX_ENUMERATED:
        before, after = np.divmod(np.arange(old * new), new)
        return before, after, True
    rng = np.random.default_rng([RESAMPLING_SEED, old, new])
    before, after = rng.integers([[old], [new]], size=(2, N_RESAMPLES))
    before[0] = after[0] = 0
    return before, after, False
