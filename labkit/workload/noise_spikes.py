"""What a stall added to single steps of arms that take turns, told from what they cost.

A machine that stands still for a second does so in one arm's turn, and a ratio of total
times would blame the arm. Noise of this kind only adds time, and to few steps, so a step
that took clearly longer than expected (``LIMIT`` times) is taken for what was expected;
every other step stays as measured.

Where all arms ran the same schedule, step j of one arm computed what step j of another
did, and the others' times say what to expect. They are scaled by the ratio that the two
arms have in steps of about the same length, so that what an arm does faster or slower
stays, also where it does so in one kind of step alone. Where the schedules differ, every
arm is compared with itself: with its steps that computed about as many tokens. That is a
rougher guess, so only what exceeds ``ROUGH_LIMIT`` times it counts, and a step with few
like it (a long prefill) is left as it is.

What an arm alone does in few of its steps (it compacts, it copies, it evicts) looks like a
stall, too. One process can't tell them apart, many can: :mod:`labkit.analysis.stall_attribution`.

Measured (chat on tiny, two cores, three arms, one pass, 8 processes; paired sd between
processes): alone 1.0 % of a copy and 0.5 of an arm with a planted 3 % (3.0 found), where
totals have 0.9 and 1.1 (2.7 found); beside one busy process, with OpenMP's pool, 2.2 and
2.3 %, where totals have 5.9 and 7.6.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LIMIT, ROUGH_LIMIT = 1.3, 3.0
LEAST_S = 0.002  # an excess below it is no stall
NEIGHBOURS = 21
ALIKE, LEAST_ALIKE = 1.25, 8

Array = NDArray[np.float64]


def among_equals(times: Array) -> Array:
    """Return what every step lost to a stall, by the same step of the other arms.

    Parameters
    ----------
    times
        Seconds, [arms, steps]; at least two arms.

    Returns
    -------
    float64 [arms, steps]
        Seconds, 0 where there was none.
    """
    expected = np.full_like(times, np.inf)
    for arm, own in enumerate(times):
        for other in np.delete(times, arm, axis=0):
            ratio = running_median(np.log(own / other), np.minimum(own, other))
            expected[arm] = np.minimum(expected[arm], other * np.exp(ratio))
    return _excess(times, expected, LIMIT)


def among_alike(times: Array, tokens: Array) -> Array:
    """Return what every step lost to a stall, by the arm's own of about as many tokens.

    Parameters
    ----------
    times
        Seconds, [steps].
    tokens
        How many each step computed, [steps]; 0: unknown.

    Returns
    -------
    float64 [steps]
        Seconds, 0 where there was none.
    """
    expected = np.full_like(times, np.inf)
    for index in np.flatnonzero(tokens > 0):
        ratios = tokens / tokens[index]
        alike = times[(ratios >= 1 / ALIKE) & (ratios <= ALIKE)]
        if len(alike) >= LEAST_ALIKE:
            expected[index] = np.median(alike)
    return _excess(times, expected, ROUGH_LIMIT)


def _excess(times: Array, expected: Array, limit: float) -> Array:
    stalled = (times > limit * expected) & (times > expected + LEAST_S)
    return np.where(stalled, times - expected, 0.0)


def running_median(values: Array, along: Array) -> Array:
    """Return for every value the median of those that are nearest in the order of ``along``."""
    order = np.argsort(along, kind="stable")
    width = min(NEIGHBOURS, len(values))
    windows = np.lib.stride_tricks.sliding_window_view(values[order], width)
    medians = np.median(windows, axis=1)
    first = np.clip(np.arange(len(values)) - width // 2, 0, len(medians) - 1)
    found = np.empty_like(values)
    found[order] = medians[first]
    return found
