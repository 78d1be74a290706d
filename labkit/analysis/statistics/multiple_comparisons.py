"""Adjusted p-values and simultaneous intervals for a family of rows.

Rows of one arm come from the same runs and share every relabelling, so the single-step max-T
method of P. H. Westfall and S. S. Young (1993, section 2.3) needs no assumption about how the
rows depend on each other. One test, of "the effect of this row is ``delta``", gives everything
that is reported about a row. Subtract ``delta`` from the arm's values. A relabelling counts
against rejecting if it gives this row a statistic at least as large as the observed one (the
row's own exact test), or gives any *other* row a standardised statistic at least as large,
after that row's own estimated effect is subtracted. The p-value is the share of such
relabellings.

The p-value falls as ``delta`` moves away from the estimate: on each side of it, a relabelling
counts up to a certain distance. So the limits of the interval are order statistics of these
distances, found without a search, and at ``delta = 0`` the same count is the adjusted p. An
interval therefore never contradicts its p: it excludes 0 if and only if the adjusted p is at
most alpha. A family of one row gives the plain permutation test and its interval
(:mod:`labkit.analysis.statistics.hodges_lehmann`).

The effects of the other rows are subtracted because the interval asks what noise alone would
do. A shift of one row therefore moves the interval of that row only.

Cells are randomised independently of each other and share no relabelling: a joint relabelling
takes one from each (:func:`joint_p_values`). Tests without any relabelling in common are
adjusted by the method of S. Holm (1979).

A relabelling and its mirror image (all labels swapped) have the same absolute statistics, and count
up to the same distances: ``d`` and ``c`` have the other sign. So half of the relabellings are
computed, and each counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from labkit.analysis.statistics.permutation_test import (
    RESAMPLING_SEED,
    Floats,
    Relabellings,
    smallest,
)

JOINT_DRAWS = 100_000


@dataclass(frozen=True)
class InvertedTest:
    """A row's adjusted test as a function of the shift: p-values and the interval.

    ``lower_breakpoints`` and ``upper_breakpoints``, float64 [relabellings / 2], are the shifts
    below and above ``mean_difference`` up to which each relabelling, and its mirror image, counts
    against rejecting. They are not sorted, because counting and selecting take a tenth of the time.
    Alpha is divided among ``n_families`` families (C. E. Bonferroni).
    """

    mean_difference: float
    lower_breakpoints: Floats
    upper_breakpoints: Floats
    n_families: int = 1
    _intervals: dict[float, tuple[float, float] | None] = field(default_factory=dict)

    def p(self, shift: float) -> float:
        """Return the two-sided p of "the effect is ``shift``"."""
        # At least 1e-12, because differences of logarithms have the rounding of the logarithms.
        edge = 1e-12 * max(1.0, abs(self.mean_difference), abs(shift))
        if shift < self.mean_difference:
            against = int(np.count_nonzero(self.lower_breakpoints <= shift + edge))
        else:
            against = int(np.count_nonzero(self.upper_breakpoints >= shift - edge))
        return min(1.0, self.n_families * against / len(self.lower_breakpoints))

    def p_greater(self, shift: float) -> float:
        return self.p(shift) / 2.0 if shift < self.mean_difference else 1.0

    def p_less(self, shift: float) -> float:
        return self.p(shift) / 2.0 if shift > self.mean_difference else 1.0

    def interval(self, alpha: float) -> tuple[float, float] | None:
        if alpha not in self._intervals:
            self._intervals[alpha] = self._select_interval(alpha)
        return self._intervals[alpha]

    def _select_interval(self, alpha: float) -> tuple[float, float] | None:
        # The 1e-9 keeps rounding from turning 0.05 * 1,200 into 59.
        count = 2 * len(self.lower_breakpoints)
        index = math.floor(alpha * count / self.n_families + 1e-9)
        if index >= count:
            return None
        low = smallest(self.lower_breakpoints, index // 2)
        high = -smallest(-self.upper_breakpoints, index // 2)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None


@dataclass(frozen=True)
class RowPermutations:
    """One row's statistics under all relabellings of a blocked design.

    ``null_distribution`` is float64 [relabellings / 2]: mean differences under the rows of
    ``labels.signs``, the observed one first. ``sum_of_squares`` is the sum of squared deviations of
    log values from their block means.
    """

    labels: Relabellings
    null_distribution: Floats
    sum_of_squares: float

    @property
    def mean_difference(self) -> float:
        """The observed mean difference, arm minus baseline."""
        return float(self.null_distribution[0])

    @cached_property
    def residual_statistics(self) -> Floats:
        """Absolute standardised statistics after the estimated effect is subtracted.

        float64 [relabellings / 2]. The divisor is the standard deviation over all relabellings, a
        constant of the test (sampling without replacement within blocks).
        """
        if self._residual_squares <= 0.0:
            return np.zeros_like(self.null_distribution)
        scale = math.sqrt(self._label_squares * self._max_square / self._residual_squares)
        return np.asarray(np.abs(self._residuals) * scale)

    @property
    def observed_statistic(self) -> float:
        """The observed absolute standardised statistic."""
        if self.sum_of_squares <= 0.0:
            return 0.0
        return math.sqrt(self._max_square * self._label_squares / self.sum_of_squares) * abs(
            self.mean_difference
        )

    @property
    def at_least_observed(self) -> NDArray[np.bool_]:
        """Whether a relabelling's statistic reaches the observed one: bool [relabellings / 2]."""
        sizes = np.abs(self.null_distribution)
        return np.asarray(sizes >= sizes[0] - 1e-12 * float(sizes.max(initial=1.0)))

    def inverted_test(self, others: Floats | None = None, n_families: int = 1) -> InvertedTest:
        """Return the row's test as a function of the shift.

        ``others``: the largest of the other rows' :attr:`residual_statistics`, None if there are
        none. ``n_families``: number of families among which alpha is divided.
        """
        below, above = self._own_distances
        if others is not None:
            elsewhere = self._to_distances(others)
            below, above = np.maximum(below, elsewhere), np.maximum(above, elsewhere)
        return InvertedTest(
            self.mean_difference,
            self.mean_difference - below,
            self.mean_difference + above,
            n_families,
        )

    @property
    def _label_squares(self) -> float:
        """The arm indicator's sum of squares within blocks: ``r / 2`` per block."""
        return self.labels.blocks * self.labels.runs / 2.0

    @property
    def _max_square(self) -> float:
        """The largest square that a standardised statistic can have."""
        return float(self.labels.blocks * (2 * self.labels.runs - 1))

    @property
    def _residual_squares(self) -> float:
        residual = self.sum_of_squares - self._label_squares * self.mean_difference**2
        return residual if residual > 1e-13 * self.sum_of_squares else 0.0

    @cached_property
    def _own_distances(self) -> tuple[Floats, Floats]:
        """Return how far below and above the mean difference each relabelling counts in this row.

        At the shift ``mean_difference - e`` the observed statistic is ``e``, and relabelling ``j``
        has the statistic ``d_j + e c_j``. Here ``d_j`` is its statistic after the mean difference
        is subtracted, and ``c_j`` is its correlation with the observed labels. ``|d_j + e c_j|`` is
        at least ``e`` for every ``e`` up to the larger of ``d_j / (1 - c_j)`` and
        ``-d_j / (1 + c_j)``. On the other side, at ``mean_difference + e``, the same holds with
        ``-d_j`` in place of ``d_j``.
        """
        correlation = self.labels.half_correlation
        always = np.abs(correlation) > 1.0 - 1e-9  # the observed labels and their mirror image
        forward, backward = 1.0 - correlation, 1.0 + correlation
        forward[always] = backward[always] = 1.0
        with_effect, against = self._residuals / forward, self._residuals / backward
        below, above = np.maximum(with_effect, -against), np.maximum(-with_effect, against)
        below[always] = above[always] = np.inf
        return below, above

    @cached_property
    def _residuals(self) -> Floats:
        """The null distribution after the mean difference is subtracted."""
        return self.null_distribution - self.mean_difference * self.labels.half_correlation

    def _to_distances(self, sizes: Floats) -> Floats:
        """Convert absolute values of the observed standardised statistic to distances.

        The statistic depends on the tested shift. Its absolute value is ``size`` if the shift is
        this distance from the mean difference. With ``R2 = size^2 / _max_square`` (the share of the
        sum of squares that the effect explains), the distance is ``sqrt(R2 / (1 - R2) *
        _residual_squares / _label_squares)``, and infinite if ``R2 = 1``.
        """
        distance = sizes**2
        distance /= self._max_square
        np.minimum(distance, 1.0, out=distance)
        gap = 1.0 - distance
        unbounded = gap <= 1e-12
        gap[unbounded] = 1.0
        distance /= gap
        distance *= self._residual_squares
        np.sqrt(distance, out=distance)
        distance /= math.sqrt(self._label_squares)
        distance[unbounded] = np.inf
        return distance


def max_of_other_rows(tests: Sequence[RowPermutations]) -> list[Floats | None]:
    """Return, for each row, the largest residual statistic of the other rows.

    Each result is float64 [relabellings / 2], or None if the family has only one row.
    """
    if len(tests) == 1:
        return [None]
    sizes = [test.residual_statistics for test in tests]
    before = list(accumulate(sizes, np.maximum))  # row by row: np.maximum.accumulate is slower
    after = list(accumulate(reversed(sizes), np.maximum))[::-1]
    first, last = after[1], before[-2]
    inner = [np.maximum(before[i - 1], after[i + 1]) for i in range(1, len(tests) - 1)]
    return [first, *inner, last]


def per_row_alphas(tests: Sequence[RowPermutations], alpha: float) -> list[float]:
    """Return each row's own significance level in a family that spends ``alpha``.

    The critical value of the largest residual statistic over all rows is converted to a level
    of Student's t with each row's degrees of freedom. The observed labels and their mirror image
    count against every shift, so they are placed above all others. All levels are 0.0 if the family
    cannot reach ``alpha``.
    """
    largest = reduce(np.maximum, (test.residual_statistics for test in tests))
    index = math.floor(alpha * 2 * len(largest) + 1e-9)
    if index < 2:
        return [0.0] * len(tests)
    if largest.max() == 0.0:  # no noise at all
        return [alpha] * len(tests)
    critical: dict[int, float] = {}  # by id of the relabellings; most rows share them
    for labels in {id(test.labels): test.labels for test in tests}.values():
        always = np.abs(labels.half_correlation) > 1.0 - 1e-9
        statistics = np.where(always, -np.inf, -largest)
        critical[id(labels)] = -smallest(statistics, index // 2)
    return [_student_alpha(critical[id(test.labels)], test.labels) for test in tests]


def _student_alpha(critical: float, labels: Relabellings) -> float:
    """Convert the critical value of a standardised statistic to a two-sided level of t."""
    df = labels.blocks * (2 * labels.runs - 1) - 1
    explained = critical**2 / (df + 1)
    if df < 1 or explained >= 1.0:
        return 0.0
    return float(2.0 * stdtr(df, -math.sqrt(df * explained / (1.0 - explained))))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method, in the order of ``p``."""
    values = np.asarray(p, np.float64)
    order = np.argsort(values, kind="stable")
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(x) for x in adjusted]


def holm_levels(p: Sequence[float], alpha: float) -> list[float]:
    """Return the level at which Holm's method tests each hypothesis, in the order of ``p``.

    An interval at this level excludes a hypothesis if and only if it is rejected at ``alpha``.
    """
    rejected = sum(one <= alpha for one in holm(p))
    ranks = np.argsort(np.argsort(p, kind="stable"), kind="stable")
    return [alpha / (len(p) - min(int(rank), rejected)) for rank in ranks]


def joint_p_values(cells: Sequence[Sequence[RowPermutations]]) -> list[list[float]]:
    """Adjust the p-values of "no effect" over the rows of many cells by single-step max-T.

    Each p is that of :meth:`RowPermutations.inverted_test` at shift 0, with the rows of all cells
    as the other rows. 100,000 joint relabellings are drawn; the first has the observed labels of
    all cells. Each cell is asked for twice and not kept: a sequence that builds the tests of a cell
    when they are asked for needs the memory of one cell.
    """
    top, second = (np.full(JOINT_DRAWS, -np.inf) for _ in range(2))
    leader = np.full(JOINT_DRAWS, -1)  # per draw: the cell with the largest statistic
    for i, (tests, draws) in enumerate(_with_joint_draws(cells)):
        largest = reduce(np.maximum, (test.residual_statistics for test in tests))[draws]
        leader[largest > top] = i
        np.maximum(second, np.minimum(top, largest), out=second)
        np.maximum(top, largest, out=top)
    return [
        _cell_p(tests, draws, np.where(leader == i, second, top))
        for i, (tests, draws) in enumerate(_with_joint_draws(cells))
    ]


def _with_joint_draws(
    cells: Sequence[Sequence[RowPermutations]],
) -> Iterator[tuple[Sequence[RowPermutations], NDArray[np.int64]]]:
    """Yield each cell and its part of the joint draws; every call yields the same draws.

    Draws are generated again instead of stored, because they take 0.8 MB per cell.
    """
    rng = np.random.default_rng([RESAMPLING_SEED, len(cells)])
    for tests in cells:
        labels = tests[0].labels
        draws = rng.integers(labels.count, size=JOINT_DRAWS)
        draws[0] = 0
        yield tests, labels.rows_of(draws)


def _cell_p(
    tests: Sequence[RowPermutations], draws: NDArray[np.int64], elsewhere: Floats
) -> list[float]:
    """Return one cell's p-values; ``elsewhere``: the other cells' largest statistics, by draw."""
    p_values = []
    for test, others in zip(tests, max_of_other_rows(tests), strict=True):
        observed, against = test.observed_statistic * (1.0 - 1e-12), test.at_least_observed
        if others is not None:
            against |= others >= observed
        p_values.append(float(np.mean(against[draws] | (elsewhere >= observed))))
    return p_values
