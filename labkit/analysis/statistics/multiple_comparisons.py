"""One family of rows: adjusted p-values and the intervals that go with them.

Rows of one arm come from the same runs and share a relabelling, so the single-step max-T of
P. H. Westfall and S. S. Young (1993, section 2.3) needs no assumption about how they depend
on each other. Everything said about a row follows from one test of "its effect is
``delta``": take ``delta`` off the arm's values. Relabelling ``j`` then speaks against a
claim if it gives this row a statistic as large as the observed one (the row's own exact
test), or gives any *other* row a standardised statistic as large, that row's own estimated
effect taken off. The p-value is the share of such relabellings.

The p-value falls with the distance of ``delta`` from the estimate, and each relabelling has
one distance on either side up to which it speaks against: so the interval's limits are
order statistics, found without a search. At ``delta = 0`` the same count is the adjusted p.
Hence an interval never contradicts its p: it leaves 0 out iff the adjusted p is at most
alpha. With one row this is the plain permutation test and its interval
(:mod:`labkit.analysis.statistics.effect_size`).

The other rows' effects are taken off because the interval asks what noise alone would do;
so a shift of one row moves its own interval and no other.

Families that share no relabelling: many cells were randomised independently of each other,
so a joint relabelling takes one of each (:func:`joint_p_values`). What has no relabelling in common
at all uses S. Holm (1979).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from labkit.analysis.statistics.permutation_test import RESAMPLING_SEED, Floats, Relabellings

JOINT_DRAWS = 100_000


@dataclass(frozen=True)
class InvertedTest:
    """The shifts of one row that the test rejects or does not, at every level.

    ``lows`` and ``highs``: float64 [relabellings], ascending; the shift below and above
    ``centre`` (the mean difference) up to which one relabelling speaks against a claim.
    ``times``: how many such families share alpha (C. E. Bonferroni).
    """

    mean_difference: float
    lower_breakpoints: Floats
    upper_breakpoints: Floats
    n_families: int = 1

    def p(self, shift: float) -> float:
        """Two-sided p of "the effect is ``shift``"."""
        edge = 1e-12 * max(abs(self.mean_difference), abs(shift))
        if shift < self.mean_difference:
            against = int(np.searchsorted(self.lower_breakpoints, shift + edge, side="right"))
        else:
            below = int(np.searchsorted(self.upper_breakpoints, shift - edge, side="left"))
            against = len(self.upper_breakpoints) - below
        return min(1.0, self.n_families * against / len(self.lower_breakpoints))

    def p_greater(self, shift: float) -> float:
        """One-sided p of "the effect is at most ``shift``" against "it is above"."""
        return self.p(shift) / 2.0 if shift < self.mean_difference else 1.0

    def p_less(self, shift: float) -> float:
        """One-sided p of "the effect is at least ``shift``" against "it is below"."""
        return self.p(shift) / 2.0 if shift > self.mean_difference else 1.0

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Return the shifts whose p is above ``alpha``; None where there is no bound."""
        # Without the 1e-9, 0.05 * 1,200 might fall below the integer that it is.
        index = math.floor(alpha * len(self.lower_breakpoints) / self.n_families + 1e-9)
        if index >= len(self.lower_breakpoints):
            return None
        low, high = float(self.lower_breakpoints[index]), float(self.upper_breakpoints[-1 - index])
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None


@dataclass(frozen=True)
class RowPermutations:
    """One row's statistics under all relabellings of a blocked design.

    ``statistics``: float64 [relabellings], mean differences, what was observed first.
    ``squares``: the sum of squares within blocks of the row's log values.
    """

    labels: Relabellings
    null_distribution: Floats
    sum_of_squares: float

    @property
    def mean_difference(self) -> float:
        """The mean difference, arm minus baseline."""
        return float(self.null_distribution[0])

    @cached_property
    def residual_statistics(self) -> Floats:
        """Absolute standardised statistics with the estimated effect taken off.

        The divisor is the standard deviation over all relabellings, a constant of the test
        (sampling without replacement within blocks).
        """
        left = np.abs(self.null_distribution - self.mean_difference * self.labels.label_correlation)
        rest = self._residual_squares
        if rest <= 0.0:
            return np.zeros_like(left)
        return np.asarray(left * math.sqrt(self._weight * self._bound / rest))

    @property
    def observed_statistic(self) -> float:
        """The absolute standardised statistic that was observed."""
        if self.sum_of_squares <= 0.0:
            return 0.0
        return math.sqrt(self._bound * self._weight / self.sum_of_squares) * abs(
            self.mean_difference
        )

    @property
    def at_least_observed(self) -> NDArray[np.bool_]:
        """Which relabellings give a statistic as large as the observed one, bool."""
        sizes = np.abs(self.null_distribution)
        return np.asarray(sizes >= sizes[0] - 1e-12 * float(sizes.max(initial=0.0)))

    def inverted_test(self, others: Floats | None = None, times: int = 1) -> InvertedTest:
        """Return the row's region.

        Parameters
        ----------
        others : float64 [relabellings] or None
            The largest of the other rows' :attr:`sizes`; None where there are none.
        times
            How many families share alpha.
        """
        away = self._distances()
        if others is not None:
            away = [np.maximum(side, self._distance(others)) for side in away]
        below, above = away
        return InvertedTest(
            self.mean_difference,
            np.sort(self.mean_difference - below),
            np.sort(self.mean_difference + above),
            times,
        )

    @property
    def _weight(self) -> float:
        """Sum of squares within blocks of the arm's indicator: ``r / 2`` per block."""
        return self.labels.blocks * self.labels.runs / 2.0

    @property
    def _bound(self) -> float:
        """The largest square that a standardised statistic can have."""
        return float(self.labels.blocks * (2 * self.labels.runs - 1))

    @property
    def _residual_squares(self) -> float:
        left = self.sum_of_squares - self._weight * self.mean_difference**2
        return left if left > 1e-13 * self.sum_of_squares else 0.0

    def _distances(self) -> list[Floats]:
        """How far below and above the centre each relabelling reaches the observed one.

        At ``centre +- e`` relabelling ``j`` has the statistic ``d_j -+ e c_j`` where ``d_j``
        is its own with the centre's effect taken off: as large as ``e`` up to the larger of
        ``d_j / (1 - c_j)`` and ``-d_j / (1 + c_j)``, and mirrored below.
        """
        overlap = self.labels.label_correlation
        left = self.null_distribution - self.mean_difference * overlap
        same, mirror = 1.0 - overlap < 1e-9, 1.0 + overlap < 1e-9
        forward = np.where(same, 1.0, 1.0 - overlap)
        backward = np.where(mirror, 1.0, 1.0 + overlap)
        below, above = (
            np.where(same | mirror, np.inf, np.maximum(0.0, np.maximum(x / forward, -x / backward)))
            for x in (left, -left)
        )
        return [below, above]

    def _distance(self, sizes: Floats) -> Floats:
        """Return the distance at which the observed statistic, standardised, has these sizes.

        With ``R2 = size^2 / bound`` (the share of squares that the effect explains) it is
        ``sqrt(R2 / (1 - R2) * residual squares / weight)``.
        """
        share = np.minimum(sizes**2 / self._bound, 1.0)
        gap = 1.0 - share
        away = np.sqrt(share / np.where(gap > 1e-12, gap, 1.0) * self._residual_squares)
        return np.where(gap > 1e-12, away / math.sqrt(self._weight), np.inf)


def max_of_other_rows(tests: Sequence[RowPermutations]) -> list[Floats | None]:
    """Return, for each row, the largest size of any other row under every relabelling."""
    if len(tests) == 1:
        return [None]
    sizes = np.stack([test.residual_statistics for test in tests])
    before = np.maximum.accumulate(sizes, axis=0)
    after = np.maximum.accumulate(sizes[::-1], axis=0)[::-1]
    first, last = after[1], before[-2]
    inner = [np.maximum(before[i - 1], after[i + 1]) for i in range(1, len(tests) - 1)]
    return [first, *inner, last]


def per_row_alphas(tests: Sequence[RowPermutations], alpha: float) -> list[float]:
    """Return the level at which each row is tested alone while the family spends ``alpha``.

    From the critical value of the largest size over all rows, turned into Student's t of
    each row's design. 0.0 where the family cannot reach ``alpha``.
    """
    largest = np.sort(np.max(np.stack([test.residual_statistics for test in tests]), axis=0))
    index = math.floor(alpha * len(largest) + 1e-9)
    if index < 2:  # what was observed and its mirror image are always as large
        return [0.0] * len(tests)
    if largest[-1] == 0.0:  # no noise at all
        return [alpha] * len(tests)
    return [_student_alpha(float(largest[-1 - index]), test.labels) for test in tests]


def _student_alpha(critical: float, labels: Relabellings) -> float:
    """Turn a standardised statistic's critical value into Student's two-sided level."""
    freedom = labels.blocks * (2 * labels.runs - 1) - 1
    share = critical**2 / (freedom + 1)
    if freedom < 1 or share >= 1.0:
        return 0.0
    return float(2.0 * stdtr(freedom, -math.sqrt(freedom * share / (1.0 - share))))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method, in the order given."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(x) for x in adjusted]


def joint_p_values(cells: Sequence[Sequence[RowPermutations]]) -> list[list[float]]:
    """Adjust the p of "no effect" over the rows of many cells by single-step max-T.

    The observed relabellings of all cells together are the first of 100,000 joint draws.
    Each p is that of :meth:`RowPermutations.region` at 0, with the rows of all cells as the others.
    """
    top, second = (np.full(JOINT_DRAWS, -np.inf) for _ in range(2))
    leads = np.full(JOINT_DRAWS, -1)
    for i, (tests, drawn) in enumerate(zip(cells, _joint_draws(cells), strict=True)):
        mine = np.max(np.stack([test.residual_statistics for test in tests]), axis=0)[drawn]
        above = mine > top
        second = np.where(above, top, np.maximum(second, mine))
        leads[above] = i
        top = np.where(above, mine, top)
    return [
        _cell_p(tests, drawn, np.where(leads == i, second, top))
        for i, (tests, drawn) in enumerate(zip(cells, _joint_draws(cells), strict=True))
    ]


def _joint_draws(cells: Sequence[Sequence[RowPermutations]]) -> Iterator[NDArray[np.int64]]:
    """Yield each cell's part of the joint draws: the same ones whenever it is asked.

    All at once they would take 0.8 MB a cell.
    """
    rng = np.random.default_rng([RESAMPLING_SEED, len(cells)])
    for tests in cells:
        drawn = rng.integers(len(tests[0].null_distribution), size=JOINT_DRAWS)
        drawn[0] = 0
        yield drawn


def _cell_p(
    tests: Sequence[RowPermutations], drawn: NDArray[np.int64], elsewhere: Floats
) -> list[float]:
    """Return the p of one cell's rows; ``elsewhere``: the largest size in other cells, drawn."""
    found = []
    for test, others in zip(tests, max_of_other_rows(tests), strict=True):
        largest = elsewhere if others is None else np.maximum(elsewhere, others[drawn])
        against = test.at_least_observed[drawn] | (
            largest >= test.observed_statistic * (1.0 - 1e-12)
        )
        found.append(float(np.mean(against)))
    return found
