"""Effect size and its confidence interval, on the log scale.

The estimate is that of J. L. Hodges and E. L. Lehmann (1963): the median of the Walsh
averages ``(D_u + D_v) / 2``, ``u <= v``, of the differences. In a blocked design the
``D`` are all differences arm minus baseline *within* a block: ``r^2`` per block of ``r`` runs per
arm. With one run per arm these are the paired differences.

The interval holds the shifts that :mod:`.permutation_test` does not reject. Subtract ``delta``
from the arm's values: under relabelling ``j`` the statistic is ``a_j - delta c_j``, where
``a_j`` is the statistic at ``delta = 0`` and ``c_j`` that of the arm's indicator; ``c_0`` is the
largest ``c_j``. Relabelling ``j`` reaches the observed statistic if and only if ``delta`` is at
least the breakpoint ``m_j = (a_0 - a_j) / (c_0 - c_j)``. So both tails are monotone in
``delta``, and with ``N`` relabellings the limits are the ``k``-th smallest and ``k``-th
largest breakpoint, ``k = floor(alpha N / 2)``. This generalises the subset means of
J. A. Hartigan (1969) to blocks. No search is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.statistics.permutation_test import Floats, smallest

MAX_PAIRED = 1000  # differences whose pairs are listed; a block of 300 imported runs has 90,000
BISECTIONS = 60


def to_percent(log_ratio: float) -> float:
    """Convert a log ratio to percent: ``100 (e^x - 1)``."""
    return 100.0 * math.expm1(log_ratio)


def to_log_ratio(pct: float) -> float:
    """Convert percent to a log ratio; ``pct`` must be above -100."""
    return math.log1p(pct / 100.0)


def hodges_lehmann(baseline: Floats, arm: Floats) -> float:
    """Estimate the shift from ``baseline`` to ``arm``, both float64 [blocks, runs]."""
    baseline, arm = np.asarray(baseline, np.float64), np.asarray(arm, np.float64)
    differences = (arm[:, :, None] - baseline[:, None, :]).reshape(-1)
    if len(differences) <= MAX_PAIRED:
        upper = np.triu_indices(len(differences))
        return float(np.median((differences[upper[0]] + differences[upper[1]]) / 2.0))
    averages, ordered = len(differences) * (len(differences) + 1) // 2, np.sort(differences)
    middle = (_walsh_average(ordered, rank) for rank in ((averages + 1) // 2, averages // 2 + 1))
    return sum(middle) / 2.0


def _walsh_average(ordered: Floats, rank: int) -> float:
    """Return the Walsh average of a rank, from 1, of sorted values, without listing their pairs.

    It is found by bisection: how many averages are at most a guess follows from the order.
    """
    first = np.arange(len(ordered))

    def last(guess: float) -> NDArray[np.int64]:
        """Return the last place whose average with each value is at most ``guess``."""
        return np.searchsorted(ordered, 2.0 * guess - ordered, "right") - 1

    low, high = float(ordered[0]), float(ordered[-1])
    for _ in range(BISECTIONS):
        guess = (low + high) / 2.0
        enough = int(np.maximum(0, last(guess) - first + 1).sum()) >= rank
        low, high = (low, guess) if enough else (guess, high)
    partners = last(high)
    averages = (ordered + ordered[partners]) / 2.0
    return float(averages[partners >= first].max())


def mean_difference(baseline: Floats, arm: Floats) -> float:
    """Return the mean shift, which values that are rare move, both float64 [blocks, runs]."""
    return float(arm.mean() - baseline.mean())


@dataclass(frozen=True)
class Breakpoints:
    """The shift at which each relabelling reaches the observed statistic.

    ``shifts`` is float64 [others], in any order. ``n_observed`` relabellings equal the observed one
    (1, or more in a sample). They reach the observed statistic at every shift, so ``shifts`` leaves
    them out.
    """

    shifts: Floats
    n_observed: int

    @property
    def count(self) -> int:
        """Number of all relabellings."""
        return len(self.shifts) + self.n_observed

    def p_greater(self, shift: float) -> float:
        edge = shift + self._tolerance(shift)
        below = int(np.count_nonzero(self.shifts <= edge))
        return (self.n_observed + below) / self.count

    def p_less(self, shift: float) -> float:
        edge = shift - self._tolerance(shift)
        above = int(np.count_nonzero(self.shifts >= edge))
        return (self.n_observed + above) / self.count

    def interval(self, alpha: float) -> tuple[float, float] | None:
        # The 1e-9 keeps rounding from turning 0.05 * 1,200 / 2 into 29.
        index = math.floor(alpha * self.count / 2.0 + 1e-9) - self.n_observed
        if not 0 <= index < len(self.shifts):
            return None
        return smallest(self.shifts, index), -smallest(-self.shifts, index)

    def _tolerance(self, shift: float) -> float:
        return 1e-12 * max(abs(shift), float(np.max(np.abs(self.shifts), initial=0.0)))


def breakpoints(null_distribution: Floats, label_correlation: Floats) -> Breakpoints:
    """Return the breakpoints of ``null_distribution``, float64 [relabellings], observed first.

    ``label_correlation``: correlation with the observed labels, float64 [relabellings]; element 0
    is 1.
    """
    gap = 1.0 - label_correlation  # c_0 = 1
    other = gap > 1e-9
    points = (null_distribution[0] - null_distribution[other]) / gap[other]
    return Breakpoints(points, int(np.count_nonzero(~other)))
