"""Noise spikes: the time that stalls of the machine add to single steps of interleaved arms.

If the machine stalls for a second, the stall falls into one arm's turn, and a ratio of total times
would charge it to that arm. Stalls only add time, and only to a few steps. So a step that took
more than ``SPIKE_RATIO`` times its expected time is counted with the expected time. Every other
step counts as measured.

If all arms ran the same schedule, step j of one arm computed the same as step j of another. The
expected time is then the time of another arm's step j, multiplied by the median ratio of the two
arms' times in steps of about the same length. So a speed-up or slowdown of one kind of step is
preserved. With several other arms, the smallest of these times is the expected time.

If the schedules differ, the expected time is the median of the same arm's steps that computed about
as many tokens. This estimate is rougher, so only a step over ``ROUGH_SPIKE_RATIO`` times its
expected time counts as a spike. A step with few similar steps (a long prefill) counts as measured.

Work that an arm does in a few of its steps (compaction, copies, eviction) looks like a stall, too.
The times of a single process cannot tell the two apart, but those of many processes can
(:mod:`labkit.analysis.comparison.machine_or_arm_stalls`).

Measured with ``workload=chat`` and ``model=tiny`` on two cores, in 8 processes: a planted
difference of 3 % is estimated as 3.0 % (from total times: 2.7 %). The paired standard deviation
between processes of a copy of the baseline is 1.0 % (from total times: 0.9 %) on the idle machine,
and 2.2 % (5.9 %) beside a busy process, with OpenMP's pool.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SPIKE_RATIO, ROUGH_SPIKE_RATIO = 1.3, 3.0  # of the expected time
MIN_EXCESS_S = 0.002  # a smaller excess is not a stall
NEIGHBOURS = 21  # steps of about the same length
SIMILAR_RATIO, MIN_SIMILAR_STEPS = 1.25, 8  # largest ratio of tokens; number of steps

Array = NDArray[np.float64]


def by_same_step(times: Array) -> Array:
    """Return the time each step lost to a stall, judged by the same step of the other arms.

    ``times``: seconds, [arms, steps]; at least two arms. Returns seconds, [arms, steps].
    """
    expected = np.full_like(times, np.inf)
    for arm, own in enumerate(times):
        for other in np.delete(times, arm, axis=0):
            ratio = running_median(np.log(own / other), np.minimum(own, other))
            expected[arm] = np.minimum(expected[arm], other * np.exp(ratio))
    return _excess(times, expected, SPIKE_RATIO)


def by_similar_steps(times: Array, tokens: Array) -> Array:
    """Return the time each step lost to a stall, judged by similar steps of the same arm.

    ``times``: seconds, [steps]. ``tokens``: the number of tokens that each step computed, [steps];
    0 if unknown. Returns seconds, [steps].
    """
    expected = np.full_like(times, np.inf)
    for index in np.flatnonzero(tokens > 0):
        ratios = tokens / tokens[index]
        similar = times[(ratios >= 1 / SIMILAR_RATIO) & (ratios <= SIMILAR_RATIO)]
        if len(similar) >= MIN_SIMILAR_STEPS:
            expected[index] = np.median(similar)
    return _excess(times, expected, ROUGH_SPIKE_RATIO)


def _excess(times: Array, expected: Array, ratio: float) -> Array:
    stalled = (times > ratio * expected) & (times > expected + MIN_EXCESS_S)
    return np.where(stalled, times - expected, 0.0)


def running_median(values: Array, along: Array) -> Array:
    """Return for each value the median of the values with about the same ``along``.

    Returns float64 [n], in the order of ``values``.
    """
    order = np.argsort(along, kind="stable")
    width = min(NEIGHBOURS, len(values))
    windows = np.lib.stride_tricks.sliding_window_view(values[order], width)
    medians = np.median(windows, axis=1)
    first = np.clip(np.arange(len(values)) - width // 2, 0, len(medians) - 1)
    smoothed = np.empty_like(values)
    smoothed[order] = medians[first]
    return smoothed
