"""Equivalence: two one-sided tests (TOST, D. J. Schuirmann 1987) by shifted versions of
the permutation test.

The arms are equivalent when both "the effect is at most the lower margin" and "the effect
is at least the upper margin" are rejected; ``p`` is the larger of the two. Its converse is
the bound: the smallest margin against which equivalence would hold.
"""  # noqa: D205

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.effect import Breakpoints, log_ratio, percent


@dataclass(frozen=True)
class Equivalence:
    """``p`` of the two one-sided tests; ``bound_pct``: any difference is within this."""

    p: float
    bound_pct: float | None


def equivalence(points: Breakpoints, margin_pct: float, alpha: float) -> Equivalence:
    """Test whether the effect lies within plus or minus ``margin_pct`` percent."""
    p = max(
        points.p_above(log_ratio(-margin_pct)),
        points.p_below(log_ratio(margin_pct)),
    )
    inner = points.interval(2.0 * alpha)
    bound = None if inner is None else max(abs(percent(limit)) for limit in inner)
    return Equivalence(p=p, bound_pct=bound)
