"""Effect size, confidence interval and equivalence test, on the log scale.

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

Two arms are equivalent when that interval lies inside the margin. This is the two one-sided
tests procedure (TOST) of D. J. Schuirmann (1987) with shifted permutation tests, each at half
of alpha: both "the effect is at most the lower margin" and "the effect is at least the upper
margin" must be rejected. With half of alpha, one simultaneous interval supports every claim:
better or worse if it excludes 0, equivalent if it lies inside the margin. At most a share
alpha of all studies makes a wrong claim anywhere in the family. (At alpha each, a family would
spend alpha twice, once on differences and once on equivalence.) ``p`` is the level at which
the interval just lies inside the margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from labkit.analysis.statistics.permutation_test import Floats, smallest

MAX_LISTED_DIFFERENCES = 4000  # those of 1,000 blocks of 2 runs; imported blocks may have more
BISECTIONS = 40  # to 1e-12 of the range


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
    if len(differences) > MAX_LISTED_DIFFERENCES:
        return _bisected_walsh_median(np.sort(differences))
    upper = np.triu_indices(len(differences))
    return float(np.median((differences[upper[0]] + differences[upper[1]]) / 2.0))


def _bisected_walsh_median(ordered: Floats) -> float:
    """Return the median of the Walsh averages of sorted values without a list of all pairs."""
    n, low, high = len(ordered), float(ordered[0]), float(ordered[-1])
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        # Each pair is counted twice, each value with itself once in either count.
        pairs = int(np.searchsorted(ordered, 2 * middle - ordered, "right").sum())
        twice = pairs + int(np.searchsorted(ordered, middle, "right"))
        low, high = (middle, high) if twice < n * (n + 1) / 2 else (low, middle)
    return (low + high) / 2


def mean_difference(baseline: Floats, arm: Floats) -> float:
    """Return the mean shift, which values that are rare move, both float64 [blocks, runs]."""
    return float(arm.mean() - baseline.mean())


@dataclass(frozen=True)
class Breakpoints:
    """The shift at which each relabelling reaches the observed statistic.

    ``shifts`` is float64 [count - n_observed], in any order. ``n_observed`` relabellings equal
    the observed one (1, or more in a sample). They reach the observed statistic at every shift,
    so ``shifts`` leaves them out. ``count`` is the number of all relabellings.
    """

    shifts: Floats
    n_observed: int
    count: int

    def p_greater(self, shift: float) -> float:
        """One-sided p of "the effect is at most ``shift``" against "it is above"."""
        edge = shift + self._tolerance(shift)
        below = int(np.count_nonzero(self.shifts <= edge))
        return (self.n_observed + below) / self.count

    def p_less(self, shift: float) -> float:
        """One-sided p of "the effect is at least ``shift``" against "it is below"."""
        edge = shift - self._tolerance(shift)
        above = int(np.count_nonzero(self.shifts >= edge))
        return (self.n_observed + above) / self.count

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Return the range of shifts with two-sided p above ``alpha``, or None if unbounded."""
        # The 1e-9 keeps rounding from turning 0.05 * 1,200 / 2 into 29.
        index = math.floor(alpha * self.count / 2.0 + 1e-9) - self.n_observed
        if not 0 <= index < len(self.shifts):
            return None
        return smallest(self.shifts, index), -smallest(-self.shifts, index)

    def _tolerance(self, shift: float) -> float:
        return 1e-12 * max(abs(shift), float(np.max(np.abs(self.shifts), initial=0.0)))


class ReferenceSet(Protocol):
    """The set of relabellings over which a null distribution was computed."""

    @property
    def label_correlation(self) -> Floats:
        """Correlation with the observed labels, float64 [relabellings]; element 0 is 1."""

    @property
    def count(self) -> int:
        """Number of relabellings."""


def breakpoints(null_distribution: Floats, labels: ReferenceSet) -> Breakpoints:
    """Return the breakpoints of ``null_distribution``, float64 [relabellings], observed first."""
    gap = 1.0 - labels.label_correlation  # c_0 = 1
    other = gap > 1e-9
    points = (null_distribution[0] - null_distribution[other]) / gap[other]
    return Breakpoints(points, int(np.count_nonzero(~other)), labels.count)


@dataclass(frozen=True)
class Equivalence:
    """The result of an equivalence test.

    ``p`` is the p-value of the two one-sided tests. ``bound_pct`` is the size in percent of the
    interval limit that is further from 0: any difference is at most that large. It is None if the
    interval is unbounded.
    """

    p: float
    bound_pct: float | None


class ShiftTest(Protocol):
    """A test that gives p-values for any hypothetical shift, and the interval."""

    def p_greater(self, shift: float) -> float:
        """One-sided p of "the effect is at most ``shift``" against "it is above"."""

    def p_less(self, shift: float) -> float:
        """One-sided p of "the effect is at least ``shift``" against "it is below"."""

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Return the range of shifts with two-sided p above ``alpha``, or None if unbounded."""


class ShiftScale(Protocol):
    """The scale of a comparison: how its shifts convert to percent of the baseline."""

    def to_percent(self, shift: float) -> float:
        """Convert a shift to percent."""

    def to_shift(self, pct: float) -> float:
        """Convert percent to a shift."""


def equivalence_test(
    shifts: ShiftTest, margin_pct: float, alpha: float, scale: ShiftScale | None = None
) -> Equivalence:
    """Test whether the effect lies within plus or minus ``margin_pct`` percent.

    The bound comes from the interval at level ``1 - alpha``. ``scale``: of the shifts; None: log
    ratios.
    """
    to_shift, in_percent = (
        (to_log_ratio, to_percent) if scale is None else (scale.to_shift, scale.to_percent)
    )
    p = 2.0 * max(shifts.p_greater(to_shift(-margin_pct)), shifts.p_less(to_shift(margin_pct)))
    interval = shifts.interval(alpha)
    bound = None if interval is None else max(abs(in_percent(limit)) for limit in interval)
    return Equivalence(p=min(1.0, p), bound_pct=bound)
