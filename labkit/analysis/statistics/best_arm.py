"""The best of several arms: the arms that may be the best, and the winner's corrected interval.

Arms are compared within blocks, where larger values are better. Two questions are answered, each
with probability ``1 - alpha``:

*Which arms may be the best?* An arm is left out if some other arm is significantly better. This is
the set of J. C. Hsu's multiple comparisons with the best (1984, *Annals of Statistics* 12): for
every arm, one-sided tests against all other arms at once. The critical value of the largest
studentised difference comes from permuting residuals within blocks, which matches the
randomisation of permuted blocks and preserves how the comparisons depend on each other. The set
contains the best arm with probability ``1 - alpha`` or more. (M. Mogstad, J. P. Romano, A. M.
Shaikh and D. Wilhelm, 2024, *Review of Economic Studies* 91, give sets of ranks by the same means.)

*By how much is the winner better than the reference?* The winner was chosen because its values were
the largest, so its observed difference is too large on average, and the usual interval covers the
truth too seldom. The interval here conditions on having been chosen: the difference follows a
distribution that is truncated where another arm would have won. It is the hybrid interval of
I. Andrews, T. Kitagawa and A. McCloskey (2024, *Quarterly Journal of Economics* 139). It spends a
tenth of alpha on a simultaneous interval and never extends beyond that one. The distribution is
Student's t, with the variance of the two arms alone, because arms may differ in their noise. The
estimate is the median-unbiased one: the true difference lies above it as often as below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtr, stdtrit

from labkit.analysis.statistics.permutation_test import RESAMPLING_SEED, Floats

N_PERMUTATIONS = 4_000
MAX_VALUES_AT_ONCE = 4_000_000  # per array of permuted values
SIMULTANEOUS_SHARE = 0.1  # of alpha, spent on the simultaneous interval of the hybrid
BISECTIONS = 60


@dataclass(frozen=True)
class Winner:
    """The winner's difference from the reference arm, on the scale of the values.

    ``arm`` and ``reference`` are indices. ``difference`` is the median-unbiased estimate; it lies
    within ``interval``.
    """

    arm: int
    reference: int
    difference: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class BlockedValues:
    """Values of several arms in a blocked design, float64 [blocks, runs, arms]; larger is better.

    Raises ``ValueError`` if there are fewer than two arms, or too few values to estimate the noise.
    """

    values: Floats

    def __post_init__(self) -> None:
        shape = self.values.shape
        if len(shape) != 3 or shape[2] < 2 or shape[0] * (2 * shape[1] - 1) < 2:
            raise ValueError(
                f"values have shape {shape}; they must be [blocks, runs, arms] with two or more "
                "arms, and two or more blocks or runs"
            )

    @cached_property
    def means(self) -> Floats:
        """The arms' means, float64 [arms]."""
        return np.asarray(self.values.mean(axis=(0, 1)))

    @cached_property
    def residuals(self) -> Floats:
        """Values minus the effects of arm and block, float64 [blocks, runs, arms]."""
        centred = self.values - self.means
        return np.asarray(centred - centred.mean(axis=(1, 2), keepdims=True))

    @property
    def best(self) -> int:
        """The index of the arm with the largest mean."""
        return int(np.argmax(self.means))

    @property
    def degrees_of_freedom(self) -> int:
        """Degrees of freedom of the variance of two arms' difference."""
        blocks, runs, _ = self.values.shape
        return int(blocks * (2 * runs - 1) - 1)

    def standard_error(self, arm: int, other: int) -> float:
        """Return the standard error of the difference of two arms, from their values alone."""
        blocks, runs, _ = self.values.shape
        pair = BlockedValues(self.values[..., [arm, other]])
        variance = float(np.sum(pair.residuals**2)) / self.degrees_of_freedom
        return math.sqrt(2.0 * variance / (blocks * runs))


def possibly_best(values: Floats, alpha: float) -> tuple[int, ...]:
    """Return the indices of the arms that may be the best, the largest mean first.

    The set contains the best arm with probability ``1 - alpha`` or more, and always the arm with
    the largest mean. ``values``: float64 [blocks, runs, arms], larger is better.
    """
    arms = BlockedValues(np.asarray(values, np.float64))
    statistics = _largest_statistics(arms.values[None])[0]
    critical = _critical_value(arms, alpha)
    ordered = np.argsort(-arms.means, kind="stable")
    return tuple(int(i) for i in ordered if statistics[i] <= critical or i == arms.best)


def _critical_value(arms: BlockedValues, alpha: float) -> float:
    """Return the ``1 - alpha`` quantile of an arm's largest statistic under "no arms differ".

    Residuals are exchangeable between arms, so the statistics of all arms have the same
    distribution.
    """
    statistics = np.concatenate([_largest_statistics(part) for part in _permuted(arms.residuals)])
    return float(np.quantile(statistics, 1.0 - alpha, method="higher"))


def _permuted(residuals: Floats) -> Iterator[Floats]:
    """Yield permutations of residuals within blocks, float64 [permutations, blocks, runs, arms]."""
    blocks, runs, arms = residuals.shape
    rng = np.random.default_rng([RESAMPLING_SEED, blocks, runs, arms])
    by_block = residuals.reshape(blocks, runs * arms)
    size = max(1, MAX_VALUES_AT_ONCE // (residuals.size + arms * arms))
    for start in range(0, N_PERMUTATIONS, size):
        count = min(size, N_PERMUTATIONS - start)
        tiled = np.broadcast_to(by_block, (count, *by_block.shape))
        yield rng.permuted(tiled, axis=2).reshape(count, blocks, runs, arms)


def _largest_statistics(values: Floats) -> Floats:
    """Return how significantly each arm is exceeded by another, float64 [samples, arms].

    For each arm, the result is the largest studentised difference "another arm minus this arm". The
    variance is estimated from these two arms alone, so arms may differ in their noise. ``values``:
    float64 [samples, blocks, runs, arms].
    """
    _, blocks, runs, arms = values.shape
    of_block = values.mean(axis=2)
    means = of_block.mean(axis=1)
    differences = means[:, None, :] - means[:, :, None]  # [samples, arm, other]
    deviations = of_block - means[:, None, :]
    products = deviations.transpose(0, 2, 1) @ deviations
    squares = np.diagonal(products, axis1=1, axis2=2)
    of_pairs = squares[:, :, None] + squares[:, None, :] - 2.0 * products
    of_runs = np.sum((values - of_block[:, :, None, :]) ** 2, axis=(1, 2))
    total = of_runs[:, :, None] + of_runs[:, None, :] + runs / 2.0 * of_pairs
    variance = total / (blocks * (2 * runs - 1) - 1) * 2.0 / (blocks * runs)
    scale = np.sqrt(np.maximum(variance, np.finfo(np.float64).tiny))
    statistics = differences / scale
    statistics[:, np.arange(arms), np.arange(arms)] = -np.inf
    return np.asarray(statistics.max(axis=2))


def winner(values: Floats, reference: int, alpha: float) -> Winner:
    """Return the arm with the largest mean, and its difference from the reference arm.

    If the reference arm itself has the largest mean, the second best arm becomes the reference.
    ``values``: float64 [blocks, runs, arms], larger is better.
    """
    arms = BlockedValues(np.asarray(values, np.float64))
    best, count = arms.best, len(arms.means)
    others = [arm for arm in range(count) if arm != best]
    comparisons = count - 1
    ordered = [(best, other) for other in others]
    if reference == best:
        reference = max(others, key=lambda arm: float(arms.means[arm]))
        ordered += [(reference, arm) for arm in others if arm != reference]
        comparisons = count * (count - 1) // 2
    estimate = float(arms.means[best] - arms.means[reference])
    error = arms.standard_error(best, reference)
    if error <= 0.0:
        return Winner(best, reference, estimate, (estimate, estimate))
    low, high = _selected_range(arms.means, best, reference, ordered)
    simultaneous = SIMULTANEOUS_SHARE * alpha
    df = arms.degrees_of_freedom
    reach = -float(stdtrit(df, simultaneous / (2 * comparisons)))
    selected = _SelectedDifference(estimate, error, df, low, high, reach)
    tail = (alpha - simultaneous) / (1.0 - simultaneous) / 2.0
    return Winner(
        best,
        reference,
        selected.true_value(0.5),
        (selected.true_value(1.0 - tail), selected.true_value(tail)),
    )


def _selected_range(
    means: Floats, best: int, reference: int, ordered: list[tuple[int, int]]
) -> tuple[float, float]:
    """Return the range of observed differences for which the same two arms would be chosen.

    ``ordered`` lists the pairs (larger, smaller) of arms whose order decides the choice. Variances
    are taken to be equal: if the difference were larger by ``x``, the best arm's mean would be
    larger by ``x / 2`` and the reference's mean smaller by ``x / 2``.
    """
    share = np.zeros(len(means))
    share[best], share[reference] = 0.5, -0.5
    estimate = means[best] - means[reference]
    low, high = -math.inf, math.inf
    for above, below in ordered:
        slope, gap = share[above] - share[below], means[above] - means[below]
        if slope > 0:
            low = max(low, float(estimate - gap / slope))
        elif slope < 0:
            high = min(high, float(estimate - gap / slope))
    return low, high


@dataclass(frozen=True)
class _SelectedDifference:
    """The observed difference of two arms that were chosen because of their values.

    With a difference below ``low`` or above ``high``, other arms would have been chosen, so its
    distribution is truncated to this range. ``error`` is its standard error, with ``df`` degrees of
    freedom. The true difference is assumed to lie within ``reach`` standard errors of
    ``observed``.
    """

    observed: float
    error: float
    df: int
    low: float
    high: float
    reach: float

    def true_value(self, probability: float) -> float:
        """Return the true difference for which :meth:`_probability` equals ``probability``."""
        low, high = (self.observed + side * self.reach * self.error for side in (-1, 1))
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            if self._probability(middle) > probability:
                low = middle
            else:
                high = middle
        return (low + high) / 2.0

    def _probability(self, true: float) -> float:
        """Return the probability of a value below ``observed`` at the true difference ``true``."""
        low = max((self.low - true) / self.error, -self.reach)
        high = min((self.high - true) / self.error, self.reach)
        middle = min(max((self.observed - true) / self.error, low), high)
        total = self._between(low, high)
        return self._between(low, middle) / total if total > 0.0 else float(true < self.observed)

    def _between(self, low: float, high: float) -> float:
        """Return the probability that Student's t lies between ``low`` and ``high``.

        If both are above 0, the range is mirrored to negative values, because the difference of two
        probabilities close to 1 would lose digits.
        """
        if low > 0.0:
            low, high = -high, -low
        return float(stdtr(self.df, high) - stdtr(self.df, low))
