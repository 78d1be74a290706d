"""Change points of a short series: where its level changed, with an error rate.

The statistic of a split is the sum of squares that two means explain beyond one mean. The statistic
of a series is the largest over all splits. If nothing changed, all orders of the values are equally
likely. So the p-value is the share of orders whose statistic is at least as large as the observed
one: exact for up to 8 values, Monte Carlo otherwise (Phipson and Smyth, 2010), with so many orders
that p can be as small as half of its level. A segment is split at its largest statistic if p is at
most alpha times the segment's share of the series (binary segmentation, Vostrikova, 1981). The
levels of all segments without a change add up to at most alpha, which bounds the probability that
any of them is split. Finally, every split is tested again between its neighbours, and moved or
removed. Unlike a penalised segmentation (PELT, as in ruptures), this method has nothing to tune.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count, permutations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_SEGMENT = 2  # values on either side of a split: one outlier is no change of the level
MAX_ENUMERATED = 8  # values whose orders are enumerated (40,320)
DRAWS = 9_999  # orders that are drawn at a time


@dataclass(frozen=True)
class ChangePoint:
    """A change between values ``index - 1`` and ``index``, and the p-value of its split."""

    index: int
    p: float


def fewest_values(alpha: float) -> int:
    """Return the length of the shortest series in which a change can be found."""
    return next(n for n in count(2 * MIN_SEGMENT) if _smallest_p(n) <= alpha)


def _smallest_p(values: int) -> float:
    """Return the share of orders that keep half of the values on one side of the others."""
    return 2 / math.comb(values, values // 2)


def change_points(values: Floats, alpha: float) -> list[ChangePoint]:
    """Return the change points of a series in their order.

    ``values``: float64 [n], in order of time. ``alpha``: upper bound of the probability that any
    segment without a change is split. The Monte Carlo orders are seeded with the length.
    """
    rng = np.random.default_rng([0, len(values)])
    level_per_value = alpha / max(1, len(values))

    def change(start: int, end: int) -> ChangePoint | None:
        """Return the split of a segment with the largest statistic; None if its p is too large."""
        segment, level = values[start:end], level_per_value * (end - start)
        if len(segment) < 2 * MIN_SEGMENT or _smallest_p(len(segment)) > level:
            return None
        index, p = _largest_split(segment, level, rng)
        return ChangePoint(start + index, p) if p <= level else None

    def segments(start: int, end: int) -> list[ChangePoint]:
        split = change(start, end)
        if split is None:
            return []
        return [*segments(start, split.index), split, *segments(split.index, end)]

    changes = segments(0, len(values))
    number = 0
    while number < len(changes):  # with two changes, the first split may lie between them
        start = changes[number - 1].index if number else 0
        end = changes[number + 1].index if number + 1 < len(changes) else len(values)
        again = change(start, end)
        if again is None:
            del changes[number]
            number = max(0, number - 1)
        else:
            changes[number] = again
            number += 1
    return changes


def _largest_split(values: Floats, level: float, rng: np.random.Generator) -> tuple[int, float]:
    """Return the index of a series' split with the largest statistic, and the p-value.

    Drawing ends early once p must exceed ``level``; such a p says no more than that.
    """
    centred = values - values.mean()
    observed = _statistics(centred[None, :])[0]
    place, n = int(observed.argmax()), len(values)
    least = observed[place] * (1 - 1e-9)
    if n <= MAX_ENUMERATED:
        orders = np.array(list(permutations(centred)))
        p = float((_statistics(orders).max(axis=1) >= least).mean())
        return MIN_SEGMENT + place, p
    reached = drawn = 0
    needed = max(DRAWS, math.ceil(2 / level))
    while drawn < needed and 1 + reached <= level * (1 + needed):
        orders = rng.permuted(np.broadcast_to(centred, (DRAWS, n)), axis=1)
        reached += int((_statistics(orders).max(axis=1) >= least).sum())
        drawn += DRAWS
    return MIN_SEGMENT + place, (1 + reached) / (1 + drawn)


def _statistics(orders: Floats) -> Floats:
    """Return the statistic of every split of every order of centred values.

    float64 [orders, splits]: ``S**2 * n / (k * (n - k))`` with the sum S of the first k values.
    """
    n = orders.shape[1]
    before = np.arange(MIN_SEGMENT, n - MIN_SEGMENT + 1)
    sums = np.cumsum(orders, axis=1)[:, before - 1]
    return np.asarray(sums**2 * n / (before * (n - before)))
