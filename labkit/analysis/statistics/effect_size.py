"""The effect, its interval and its equivalence test, on the log scale.

The estimate is that of J. L. Hodges and E. L. Lehmann (1963): the median of the Walsh
averages ``(D_u + D_v) / 2``, ``u <= v``, of the differences. In a blocked design the
``D`` are all differences arm minus baseline *within* a block, ``r^2`` per block; with one
run per block these are the paired differences.

The interval holds the shifts that the permutation test of :mod:`.permutation` does not
reject. Take ``delta`` off the arm's values: under relabelling ``j`` the statistic is
``a_j - delta c_j``, where ``c_j`` is the statistic of the arm's indicator and ``c_0`` its
largest value. Relabelling ``j`` reaches the observed statistic iff ``delta`` is at least
the breakpoint ``m_j = (a_0 - a_j) / (c_0 - c_j)``. So both tails are monotone in
``delta``, and with ``N`` relabellings the limits are the ``k``-th smallest and ``k``-th
largest breakpoint, ``k = floor(alpha N / 2)``: the subset means of J. A. Hartigan (1969),
generalised to blocks. No search is needed.

Equivalence: the interval that is shown lies inside the margin.
These are the two one-sided tests of D. J. Schuirmann (1987) by shifted versions of the
permutation test, each at half of alpha: the arms are equivalent when both "the effect is at
most the lower margin" and "the effect is at least the upper margin" are rejected. Half, for
then a simultaneous interval carries every claim at once: faster or slower where it leaves
out 0, equivalent where it lies inside the margin, and all claims of a family together are
wrong in at most alpha of all studies. (Each at alpha would spend alpha twice over a family,
once on differences and once on equivalence.) ``p`` is the level at which the interval just
lies inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from labkit.analysis.statistics.permutation_test import Floats, pool_by_block, relabellings


def to_percent(to_log_ratio: float) -> float:
    """Turn a log ratio into percent: ``100 (e^x - 1)``."""
    return 100.0 * math.expm1(to_log_ratio)


def to_log_ratio(pct: float) -> float:
    """Turn percent into a log ratio; ``pct`` must be above -100."""
    return math.log1p(pct / 100.0)


def hodges_lehmann(baseline: Floats, arm: Floats) -> float:
    """Estimate the shift of ``arm`` against ``baseline``, both float64 [blocks, runs]."""
    baseline, arm = np.asarray(baseline, np.float64), np.asarray(arm, np.float64)
    differences = (arm[:, :, None] - baseline[:, None, :]).reshape(-1)
    upper = np.triu_indices(len(differences))
    return float(np.median((differences[upper[0]] + differences[upper[1]]) / 2.0))


@dataclass(frozen=True)
class Breakpoints:
    """The shifts at which one relabelling after the other reaches the observed statistic.

    ``sorted``: float64 [count - same], ascending, the observed labelling left out.
    ``same``: how many relabellings equal the observed one (1, or more in a sample); they
    reach it at every shift. ``count``: how many relabellings there are.
    """

    sorted: Floats
    same: int
    count: int

    def p_greater(self, shift: float) -> float:
        """One-sided p of "the effect is at most ``shift``" against "it is above"."""
        edge = shift + self._tolerance(shift)
        below = int(np.searchsorted(self.sorted, edge, side="right"))
        return (self.same + below) / self.count

    def p_less(self, shift: float) -> float:
        """One-sided p of "the effect is at least ``shift``" against "it is below"."""
        edge = shift - self._tolerance(shift)
        above = len(self.sorted) - int(np.searchsorted(self.sorted, edge, side="left"))
        return (self.same + above) / self.count

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Return the shifts with two-sided p above ``alpha``; None where there is no bound."""
        # Without the 1e-9, 0.05 * 1,200 / 2 might fall below the integer that it is.
        index = math.floor(alpha * self.count / 2.0 + 1e-9) - self.same
        if not 0 <= index < len(self.sorted):
            return None
        return float(self.sorted[index]), float(self.sorted[-1 - index])

    def _tolerance(self, shift: float) -> float:
        ends = np.abs(self.sorted[[0, -1]]) if len(self.sorted) else np.zeros(1)
        return 1e-12 * max(abs(shift), float(ends.max()))


class ReferenceSet(Protocol):
    """A reference set: how much each relabelling agrees with what was run (row 0: 1)."""

    @property
    def label_correlation(self) -> Floats:
        """The statistic of the arm's indicator, float64 [relabellings]."""

    @property
    def count(self) -> int:
        """How many relabellings there are."""


def breakpoints(statistics: Floats, labels: ReferenceSet) -> Breakpoints:
    """Find the breakpoints of one row's statistics, float64 [relabellings]."""
    gap = 1.0 - labels.label_correlation  # c_0 = 1
    other = gap > 1e-9
    points = (statistics[0] - statistics[other]) / gap[other]
    return Breakpoints(
        sorted=np.sort(points), same=int(np.count_nonzero(~other)), count=labels.count
    )


def confidence_interval(
    baseline: Floats, arm: Floats, alpha: float = 0.05
) -> tuple[float, float] | None:
    """Return the interval of the shift at level ``1 - alpha``; None below the p floor.

    Parameters
    ----------
    baseline, arm : float64 [blocks, runs]
    """
    baseline, arm = np.asarray(baseline, np.float64), np.asarray(arm, np.float64)
    labels = relabellings(*baseline.shape)
    statistics = labels.mean_differences(pool_by_block(baseline, arm))
    return breakpoints(statistics, labels).interval(alpha)


@dataclass(frozen=True)
class Equivalence:
    """``p`` of the two one-sided tests; ``bound_pct``: any difference is within this."""

    p: float
    bound_pct: float | None


class ShiftTest(Protocol):
    """What a test says about every shift."""

    def p_greater(self, shift: float) -> float:
        """One-sided p of "the effect is at most ``shift``" against "it is above"."""

    def p_less(self, shift: float) -> float:
        """One-sided p of "the effect is at least ``shift``" against "it is below"."""

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Return the shifts with two-sided p above ``alpha``; None where there is no bound."""


def equivalence_test(shifts: ShiftTest, margin_pct: float, alpha: float) -> Equivalence:
    """Test whether the effect lies within plus or minus ``margin_pct`` percent."""
    p = 2.0 * max(
        shifts.p_greater(to_log_ratio(-margin_pct)),
        shifts.p_less(to_log_ratio(margin_pct)),
    )
    shown = shifts.interval(alpha)
    bound = None if shown is None else max(abs(to_percent(limit)) for limit in shown)
    return Equivalence(p=min(1.0, p), bound_pct=bound)
