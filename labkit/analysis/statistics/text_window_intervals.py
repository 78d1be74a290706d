"""Intervals of statistics of windows of text whose neighbours are dependent.

Block jackknife: the windows are grouped into blocks of neighbours. The statistic is computed
without each block in turn, and the variance of the pseudo-values gives the standard error (Kunsch,
The jackknife and the bootstrap for general stationary observations, 1989). The interval is
Student's with one degree of freedom less than there are blocks. A percentile bootstrap of so few
units has intervals that are too short (coverage of .85 to .92 instead of .95). Blocks must be much
longer than the dependence: with 50 windows whose neighbours correlate by .5, the coverage is 92.1
% with eight blocks and 93.9 % with four.

In 4,000 simulated studies of 16 to 200 skewed windows (lognormal, sigma .5), the coverage is 94.2
to 94.9 % if windows are independent, 93.2 % (16 windows) to 94.4 % if neighbours correlate by .3,
and 91.2 % (16 windows) to 94.0 % if by .5. Fewer than 16 windows have no interval: the coverage of
8 is 94.4, 90.8 and 86.6 %. (Neighbours among the windows of the committed records correlate by .05
to .13.)

A quantile has the interval of R. S. Woodruff (Confidence intervals for medians and other position
measures, 1952): the interval of the share of positions below the estimate, blocks being the units
(:func:`.load_capacity.share_interval`), gives two shares, whose quantiles are the limits. With
less than 10 positions beyond the quantile there is no interval. In 500 studies of 16 to 100 windows
(255 positions) drawn from three arms of the committed records, the coverage is 95.2 to 97.6 % for
the median, 93.8 to 97.4 % for the 90 % quantile, 95.6 to 98.4 % for the 99 % quantile and, from 52
windows on, 96.3 to 99.0 % for the 99.9 % quantile (the jackknife's was 88 to 91 %).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from labkit.analysis.statistics.load_capacity import share_interval

MIN_WINDOWS = 16
MIN_BEYOND = 10  # positions beyond a quantile that has an interval
MIN_BLOCKS = 4
MAX_BLOCKS = 8
WINDOWS_PER_BLOCK = 20  # or more, if there are at least 4 * 20 windows
CONFIDENCE = 0.95
LOOKS = (4, 2, 1)  # after the windows divided by these
LOOK_CONFIDENCE = 1 - (1 - CONFIDENCE) / len(LOOKS)  # of each look (Bonferroni)
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval (95 % unless stated); no ends if there are too few windows."""

    estimate: float
    low: float | None
    high: float | None

    def transformed(self, function: Callable[[float], float]) -> Interval:
        """Return the interval after an increasing function is applied to the estimate and ends."""
        low, high = (None if x is None else function(x) for x in (self.low, self.high))
        return Interval(function(self.estimate), low, high)


def window_looks(num_windows: int) -> list[int]:
    """Return the numbers of windows after which limits are judged; the last is all of them.

    Scoring ends at the first look at which every interval of ``LOOK_CONFIDENCE`` lies within its
    limit or outside it.
    """
    counts = (max(min(MIN_WINDOWS, num_windows), -(-num_windows // part)) for part in LOOKS)
    return sorted(set(counts))


def block_jackknife(
    statistic: Callable[[Indices], float], num_windows: int, confidence: float = CONFIDENCE
) -> Interval:
    """Return a statistic of all windows with its interval.

    ``statistic``: a function that takes ascending indices of windows and returns a number.
    ``num_windows``: the number of windows. With fewer than ``MIN_WINDOWS`` there is no interval.
    """
    return _interval(*_leave_out(statistic, num_windows), confidence)


def positive_interval(
    statistic: Callable[[Indices], float], num_windows: int, confidence: float = CONFIDENCE
) -> Interval:
    """Return the interval of a statistic that is 0 or more, computed on its logarithm.

    There is no logarithm if the statistic of all windows, or of all windows but one block, is 0.
    Then the interval is computed on the statistic itself and cut off at 0.
    """
    estimate, without = _leave_out(statistic, num_windows)
    if min([estimate, *without]) > 0:
        return _interval(math.log(estimate), np.log(without), confidence).transformed(math.exp)
    return _interval(estimate, without, confidence).transformed(lambda value: max(0.0, value))


def quantile_interval(
    windows: Sequence[NDArray[np.float64]], share: float, confidence: float = CONFIDENCE
) -> Interval:
    """Return a quantile of the values of all windows, with Woodruff's interval.

    ``windows``: the values of each window, in the order of the windows. Of values that equal the
    quantile, the part counts as below it that makes the share right.
    """
    values = np.sort(np.concatenate(windows))
    estimate, count = float(np.quantile(values, share)), len(values)
    if len(windows) < MIN_WINDOWS or count * (1 - share) < MIN_BEYOND:
        return Interval(estimate, None, None)
    blocks = [np.concatenate(windows[b[0] : b[-1] + 1]) for b in _blocks(len(windows))]
    below = np.array([np.count_nonzero(block < estimate) for block in blocks], np.float64)
    equal = np.array([np.count_nonzero(block == estimate) for block in blocks], np.float64)
    total = np.array([len(block) for block in blocks], np.float64)
    part = (share * count - below.sum()) / equal.sum() if equal.any() else 0.0
    low, high = share_interval(below + part * equal, total, 1 - confidence)
    first, last = math.floor(low * count) - 1, math.ceil(high * count)
    if first < 0 or last >= count:
        return Interval(estimate, None, None)
    return Interval(estimate, float(values[first]), float(values[last]))


def _blocks(num_windows: int) -> list[Indices]:
    count = min(max(MIN_BLOCKS, num_windows // WINDOWS_PER_BLOCK), MAX_BLOCKS)
    return np.array_split(np.arange(num_windows), count)


def _leave_out(
    statistic: Callable[[Indices], float], num_windows: int
) -> tuple[float, NDArray[np.float64]]:
    """Return the statistic of all windows, and without each block (empty if too few windows)."""
    every = np.arange(num_windows)
    blocks = _blocks(num_windows) if num_windows >= MIN_WINDOWS else []
    without = [statistic(np.setdiff1d(every, block)) for block in blocks]
    return statistic(every), np.array(without, np.float64)


def _interval(estimate: float, without: NDArray[np.float64], confidence: float) -> Interval:
    count = len(without)
    if not count:
        return Interval(estimate, None, None)
    pseudo = count * estimate - (count - 1) * without
    error = float(pseudo.std(ddof=1)) / math.sqrt(count)
    reach = float(stdtrit(count - 1, (1 + confidence) / 2)) * error
    return Interval(estimate, estimate - reach, estimate + reach)
