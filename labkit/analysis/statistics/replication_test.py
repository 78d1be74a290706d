"""Replication of an author's effects in a reader's study: one decision per row, fixed beforehand.

The change of an effect from the author's study to the reader's is tested by joint relabelling
(:mod:`.difference_in_differences`). All rows are one family: p-values of "the effect did not
change" are adjusted by S. Holm (1979), and every equivalence is tested at ``alpha`` divided by the
number of rows. Both tests spend the same alpha, as in :mod:`.equivalence_test`.

If the author claims an effect, the row is, by the first rule that applies,

1. *replicated* if the change lies within the region of equivalence: the half-width of the author's
   interval plus the author's margin, but at most half of the author's effect. The reader's effect
   then has the author's direction, and an effect of half the size is outside;
2. *other size* if the effect changed and the reader's interval excludes 0 on the author's side;
3. *not replicated* if the effect changed and the reader's interval lies within the margin, or
   excludes 0 on the other side;
4. *not decided*.

If the author claims that any difference is within the margin, the row is replicated if the reader's
interval lies within the margin too, and not replicated if it excludes 0 and the effect changed.
Rows without a claim of the author are not in the family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from scipy.special import stdtrit

from labkit.analysis.statistics.difference_in_differences import EffectChange, StudyEffect
from labkit.analysis.statistics.hodges_lehmann import breakpoints
from labkit.analysis.statistics.multiple_comparisons import holm, holm_levels
from labkit.analysis.statistics.power import detectable_errors

Interval = tuple[float, float]


class ReplicationWord(Enum):
    """The decision on one row, as reports and files write it."""

    replicated = "replicated"
    other_size = "same direction, other size"
    not_replicated = "not replicated"
    not_decided = "not decided"
    no_claim = "no claim"


@dataclass(frozen=True)
class ReplicationRow:
    """What one row gives: the author's and the reader's interval, and the effect's change.

    All values are log ratios. ``author`` and ``reader`` are simultaneous intervals of their own
    studies; ``reader`` is None if the reader's study cannot claim anything. ``effects`` are the two
    estimated effects. ``margin`` is that of equivalence, and not symmetric: -2 to +2 %.
    """

    effects: tuple[StudyEffect, StudyEffect]
    change: EffectChange
    author: Interval
    reader: Interval | None
    margin: Interval

    @property
    def claims_none(self) -> bool:
        """Whether the author's interval lies within the margin."""
        return _within(self.author, self.margin)


def region_of(author: StudyEffect, interval: Interval, margin: Interval) -> float:
    """Return the largest change of an author's effect that counts as none (log ratios)."""
    if _within(interval, margin):
        return margin[1]
    effect = abs(float(author.null_distribution[0]))
    half = effect / 2
    if author.null_distribution[0] > 0:  # half of a gain in percent is nearer
        half = effect - math.log1p(math.expm1(effect) / 2)
    return min((interval[1] - interval[0]) / 2 + margin[1], half)


def times_as_long(
    author: StudyEffect, reader: StudyEffect, gap: float, level: float, *, is_equal: bool
) -> float:
    """Return how many times as long the reader's study must be to tell a gap from 0, at 80 % power.

    The result is infinite if the author's study is too short, or the noise is not known.
    ``is_equal``: the author claims no difference, which the reader's own interval decides.
    """
    df = author.degrees_of_freedom + reader.degrees_of_freedom
    errors = detectable_errors(float(stdtrit(df, 1 - level / 2)), df) if df > 0 else None
    if errors is None or not math.isfinite(author.variance + reader.variance):
        return math.inf
    spare = (gap / errors) ** 2 - (0.0 if is_equal else author.variance)
    return reader.variance / spare if spare > 0 else math.inf


@dataclass(frozen=True)
class ReplicationDecision:
    """The decision on a row, with the figures that decided it (log ratios).

    ``interval`` is that of the change, at the level at which Holm's method tested the row; None if
    it is unbounded. ``p_adjusted`` is that of "the effect did not change". ``more`` is
    :func:`times_as_long` of a row that is not decided, else None.
    """

    word: ReplicationWord
    interval: Interval | None
    p_adjusted: float
    region: float
    more: float | None = None


def decide_replication(rows: Sequence[ReplicationRow], alpha: float) -> list[ReplicationDecision]:
    """Decide every row in which the author claims something, as one family at ``alpha``."""
    if not rows or alpha <= 0:
        return [ReplicationDecision(ReplicationWord.not_decided, None, 1.0, 0.0) for _ in rows]
    ps = [row.change.p for row in rows]
    figures = zip(rows, holm(ps), holm_levels(ps, alpha), strict=True)
    return [_decide(row, alpha, len(rows), p, level) for row, p, level in figures]


def _decide(
    row: ReplicationRow, alpha: float, size: int, p_adjusted: float, level: float
) -> ReplicationDecision:
    points = breakpoints(row.change.null_distribution, row.change.label_correlation)
    region = region_of(row.effects[0], row.author, row.margin)
    p_same = 2 * max(points.p_greater(-region), points.p_less(region))
    word = _word(row, size * p_same <= alpha, p_adjusted <= alpha)
    more = None
    if word is ReplicationWord.not_decided:  # the nearer of two decisions: same, or changed
        gap = max(region, abs(row.change.estimate))
        equal = row.claims_none
        more = max(1.0, times_as_long(*row.effects, gap, alpha / size, is_equal=equal))
    return ReplicationDecision(word, points.interval(level), p_adjusted, region, more)


def _word(row: ReplicationRow, same: bool, changed: bool) -> ReplicationWord:
    reader = row.reader
    if reader is None:
        return ReplicationWord.not_decided
    if _within(reader, row.margin) if row.claims_none else same:
        return ReplicationWord.replicated
    if not changed:
        return ReplicationWord.not_decided
    if _within(reader, row.margin):
        return ReplicationWord.not_replicated
    if not _excludes_zero(reader):
        return ReplicationWord.not_decided
    same_side = not row.claims_none and (reader[0] > 0) == (row.author[0] > 0)
    return ReplicationWord.other_size if same_side else ReplicationWord.not_replicated


def _within(interval: Interval, margin: Interval) -> bool:
    return margin[0] < interval[0] and interval[1] < margin[1]


def _excludes_zero(interval: Interval) -> bool:
    return interval[0] > 0 or interval[1] < 0
