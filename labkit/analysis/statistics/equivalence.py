"""Equivalence: the interval that is shown lies inside the margin.

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

from dataclasses import dataclass
from typing import Protocol

from labkit.analysis.statistics.effect import log_ratio, percent


@dataclass(frozen=True)
class Equivalence:
    """``p`` of the two one-sided tests; ``bound_pct``: any difference is within this."""

    p: float
    bound_pct: float | None


class Shifts(Protocol):
    """What a test says about every shift."""

    def p_above(self, shift: float) -> float:
        """One-sided p of "the effect is at most ``shift``" against "it is above"."""

    def p_below(self, shift: float) -> float:
        """One-sided p of "the effect is at least ``shift``" against "it is below"."""

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Give the shifts with two-sided p above ``alpha``; None where there is no bound."""


def equivalence(shifts: Shifts, margin_pct: float, alpha: float) -> Equivalence:
    """Test whether the effect lies within plus or minus ``margin_pct`` percent."""
    p = 2.0 * max(
        shifts.p_above(log_ratio(-margin_pct)),
        shifts.p_below(log_ratio(margin_pct)),
    )
    shown = shifts.interval(alpha)
    bound = None if shown is None else max(abs(percent(limit)) for limit in shown)
    return Equivalence(p=min(1.0, p), bound_pct=bound)
