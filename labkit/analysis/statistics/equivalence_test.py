"""The equivalence test of an effect.

Two arms are equivalent when the effect's interval (:mod:`.hodges_lehmann`) lies inside the margin.
This is the two one-sided tests procedure (TOST) of D. J. Schuirmann (1987) with shifted permutation
tests, each at half of alpha: both "the effect is at most the lower margin" and "the effect is at
least the upper margin" must be rejected. With half of alpha, one simultaneous interval supports
every claim: better or worse if it excludes 0, equivalent if it lies inside the margin. At most a
share alpha of all studies makes a wrong claim anywhere in the family. (At alpha each, a family
would spend alpha twice, once on differences and once on equivalence.) ``p`` is the level at which
the interval just lies inside the margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from labkit.analysis.statistics.hodges_lehmann import to_log_ratio, to_percent


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


def equivalence_test(
    shifts: ShiftTest,
    margin_pct: float,
    alpha: float,
    to_shift: Callable[[float], float] = to_log_ratio,
    in_percent: Callable[[float], float] = to_percent,
) -> Equivalence:
    """Test whether the effect lies within plus or minus ``margin_pct`` percent.

    The bound comes from the interval at level ``1 - alpha``. ``to_shift`` and ``in_percent``
    convert percent to shifts, and back; by default these are log ratios.
    """
    p = 2.0 * max(shifts.p_greater(to_shift(-margin_pct)), shifts.p_less(to_shift(margin_pct)))
    interval = shifts.interval(alpha)
    bound = None if interval is None else max(abs(in_percent(limit)) for limit in interval)
    return Equivalence(p=min(1.0, p), bound_pct=bound)
