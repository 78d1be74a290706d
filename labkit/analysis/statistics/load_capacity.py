"""Capacity: the highest rate at which a share of requests stays within limits, with an interval.

At each tested rate, every run gives two counts: its requests, and its requests within the limits.
Requests of a run depend on each other (one slow step delays all of them), so each run is one
sample. The interval of a share is that of C. J. Clopper and E. S. Pearson (1934) at the effective
number of requests, which follows from the variance between runs (E. L. Korn and B. I. Graubard,
1998, *Survey Methodology* 24).

The share is assumed not to rise with the rate. Then two fixed sequences of tests give the interval,
each at half of alpha and without further correction, because a sequence ends at its first failure.
From the lowest rate upwards, rates are confirmed while the share's lower limit is at least the
target: capacity is at least the last of them. From the highest rate downwards, rates are refuted
while the upper limit is below the target: capacity is below the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from scipy.special import betaincinv, stdtrit

from labkit.analysis.statistics.permutation_test import Floats

MIN_RUNS = 3  # with fewer, the variance between runs is unknown


@dataclass(frozen=True)
class LoadCounts:
    """The requests of each run at one rate (per second), and those within the limits.

    ``good`` and ``requests`` are float64 [runs]. ``spent``: the part of alpha that the look spends
    at which the runs ended; 1 without looks, 0 while nothing may be claimed. The tests of a rate at
    all its looks err with probability alpha, so the sequences below hold. Raises ``ValueError`` if
    the arrays differ in length, a run has no request, or ``good`` exceeds ``requests``.
    """

    rate: float
    good: Floats
    requests: Floats
    spent: float = 1.0

    def __post_init__(self) -> None:
        if self.good.shape != self.requests.shape or self.good.ndim != 1:
            raise ValueError("good and requests must have the same shape, [runs]")
        if not len(self.good) or np.any(self.requests < 1) or np.any(self.good > self.requests):
            raise ValueError("every run needs 1 request or more, and good must not exceed requests")

    @property
    def share(self) -> float:
        """The share of requests within the limits, over all runs."""
        return float(self.good.sum() / self.requests.sum())

    def share_interval(self, alpha: float) -> tuple[float, float]:
        return share_interval(self.good, self.requests, alpha * self.spent)

    def is_decided(self, target: float, alpha: float) -> bool:
        """Return whether the share is shown to keep the target, or to miss it."""
        low, high = self.share_interval(alpha)
        return low >= target or high < target


def share_interval(good: Floats, total: Floats, alpha: float) -> tuple[float, float]:
    """Return the interval of a share; each limit errs with probability ``alpha / 2``.

    It is (0, 1) with fewer than ``MIN_RUNS`` runs, and if ``alpha`` is 0. ``good``, ``total``: what
    counts in each run, and everything of the run, float64 [runs].
    """
    if len(good) < MIN_RUNS or alpha <= 0:
        return 0.0, 1.0
    number, share = _effective_number(good, total, alpha), float(good.sum() / total.sum())
    part = share * number
    low = betaincinv(part, number - part + 1.0, alpha / 2) if part > 0 else 0.0
    high = betaincinv(part + 1.0, number - part, 1 - alpha / 2) if part < number else 1.0
    return float(low), float(high)


def _effective_number(good: Floats, total: Floats, alpha: float) -> float:
    """Return the number of independent requests that would be as informative as these."""
    number, runs, share = float(total.sum()), len(good), float(good.sum() / total.sum())
    deviations = good - share * total
    variance = float(np.sum(deviations**2)) * runs / (runs - 1) / number**2
    effective = share * (1.0 - share) / variance if variance > 0.0 else number
    quantiles = stdtrit([max(1.0, number - 1.0), runs - 1.0], 1.0 - alpha / 2)
    return min(effective * float(quantiles[0] / quantiles[1]) ** 2, number)


@dataclass(frozen=True)
class Capacity:
    """The highest rate at which the target share is kept, in the unit of the loads.

    ``estimate`` is interpolated between the tested rates; None if it lies outside them. With the
    stated confidence, capacity is at least ``at_least`` and below ``below``. Both are tested rates:
    ``at_least`` is None if no rate was confirmed, ``below`` is None if no rate was refuted.
    """

    estimate: float | None
    at_least: float | None
    below: float | None


def load_capacity(loads: Sequence[LoadCounts], target: float, alpha: float) -> Capacity:
    """Return the capacity of an engine from its loads.

    ``target``: the share of requests that must be within the limits, 0 to 1. ``alpha``: the
    interval contains the capacity with probability ``1 - alpha`` or more.
    """
    ordered = sorted(loads, key=lambda load: load.rate)
    intervals = [load.share_interval(alpha) for load in ordered]
    at_least = below = None
    pairs = list(zip(ordered, intervals, strict=True))
    for load, _ in takewhile(lambda pair: pair[1][0] >= target, pairs):
        at_least = load.rate
    for load, _ in takewhile(lambda pair: pair[1][1] < target, reversed(pairs)):
        below = load.rate
    return Capacity(_interpolated(ordered, target), at_least, below)


def _interpolated(ordered: Sequence[LoadCounts], target: float) -> float | None:
    """Return the rate at which the fitted share crosses the target, or None if it does not.

    The fit is the least-squares fit among those that do not rise with the rate (pooled adjacent
    violators). Between tested rates, it is linear in the logarithm of the rate.
    """
    shares = _non_increasing(
        [load.share for load in ordered], [load.requests.sum() for load in ordered]
    )
    for i in range(len(ordered) - 1):
        high, low = shares[i], shares[i + 1]
        if high >= target > low:
            part = (high - target) / (high - low)
            rates = [math.log(load.rate) for load in ordered[i : i + 2]]
            return math.exp(rates[0] + part * (rates[1] - rates[0]))
    return None


def _non_increasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the weighted least-squares fit among the sequences that do not increase."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, float(weight), 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [mean for mean, _, count in pools for _ in range(count)]
