"""Pilot of a kernel workload: what each case costs, and how much its rounds vary.

The rounds of a study follow from it (:mod:`labkit.experiment.schedule.time_allocation`). It
reports no arm's times, so that nothing can follow from a difference between the arms.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from labkit.workload.kernels.kernel_samples import CaseRounds
from labkit.workload.kernels.launch_timing import Clock
from labkit.workload.measurement import CasePilot

MIN_ROUNDS, MAX_ROUNDS = 3, 200
NORMAL_SD = 1.4826  # standard deviation over median absolute deviation, for normal noise

MeasureRound = Callable[[CaseRounds, Iterable[tuple[int, int]]], None]


def pilot_cases(
    warmed_up: Iterable[CaseRounds],
    measure_round: MeasureRound,
    order: random.Random,
    clock: Clock,
    case_s: float,
) -> list[CasePilot]:
    """Measure rounds of each case for about ``case_s`` seconds, as soon as it is warmed up.

    A case in two states of the caches is one case, whose round is one in each state.
    """
    pilots: dict[str, CasePilot] = {}
    start = clock()
    for case in warmed_up:
        name, warm = case.arms[0].prepared.batch.size.case.name, clock()
        round_s = _measure(case, measure_round, order, clock, case_s)
        sd = round_sd([np.log(arm.seconds) for arm in case.arms])
        other = pilots.get(name, CasePilot(name, 0.0, 0.0, 0.0, 0))
        pilots[name] = CasePilot(
            name,
            other.round_s + round_s,
            other.warm_up_s + warm - start,
            max(other.sd, sd),
            len(case.pulse_s),
        )
        start = clock()
    return list(pilots.values())


def _measure(
    case: CaseRounds,
    measure_round: MeasureRound,
    order: random.Random,
    clock: Clock,
    case_s: float,
) -> float:
    """Measure a case's rounds, and return the median seconds of one."""
    arms, seconds = [arm.prepared.arm for arm in case.arms], list[float]()
    while len(seconds) < MIN_ROUNDS or (sum(seconds) < case_s and len(seconds) < MAX_ROUNDS):
        start = clock()
        measure_round(case, [(a, n) for n, a in enumerate(order.sample(arms, len(arms)))])
        seconds.append(clock() - start)
    return float(np.median(seconds))


def round_sd(log_times: Sequence[NDArray[np.float64]]) -> float:
    """Return the standard deviation of a round's log ratio of two arms, robust against outliers.

    ``log_times``: for each arm, its log times in the same rounds. Two rounds of a single arm are
    taken for the same round of two arms.
    """
    times = np.asarray(log_times, np.float64)
    ratios = times[1:] - times[0] if len(times) > 1 else math.sqrt(2) * times
    deviations = np.abs(ratios - np.median(ratios, axis=1, keepdims=True))
    rounds = times.shape[1]
    return float(NORMAL_SD * np.median(deviations) * math.sqrt(rounds / max(1, rounds - 1)))
