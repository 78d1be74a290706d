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

from labkit.workload.kernels.kernel_case_rounds import CaseRounds
from labkit.workload.kernels.launch_timing import Clock
from labkit.workload.measurement import CasePilot
from labkit.workload.turn_order import spread_rounds

MIN_ROUNDS, MAX_ROUNDS = 3, 200
NORMAL_SD = 1.4826  # standard deviation over median absolute deviation, for normal noise

MeasureRound = Callable[[CaseRounds, Sequence[tuple[int, int]]], None]


def pilot_cases(
    warmed_up: Iterable[CaseRounds],
    measure_round: MeasureRound,
    order: random.Random,
    clock: Clock,
    seconds: float,
) -> list[CasePilot]:
    """Warm up all cases, then measure rounds of them for about ``seconds``, the same time for each.

    As in a measurement, the rounds of all cases are mixed: a round that follows one of its own case
    varies less. A case in two states of the caches is one case, whose round is one in each state.
    """
    cases, warm_up_s, start = [], [], clock()
    for case in warmed_up:
        cases.append(case)
        warm_up_s.append(clock() - start)
        start = clock()
    first_s = [_round_s(case, measure_round, order, clock) for case in cases]
    case_s = seconds / max(1, len(cases))
    more = [
        min(MAX_ROUNDS, max(MIN_ROUNDS, int(case_s / max(round_s, 1e-9)))) - 1
        for round_s in first_s
    ]
    round_s: list[list[float]] = [[one] for one in first_s]
    for index in spread_rounds(more, order):
        round_s[index].append(_round_s(cases[index], measure_round, order, clock))
    pilots: dict[str, CasePilot] = {}
    for case, warm_s, each_s in zip(cases, warm_up_s, round_s, strict=True):
        name = case.arms[0].prepared.batch.size.case.name
        other = pilots.get(name, CasePilot(name, 0.0, 0.0, 0.0, 0))
        sd = round_sd([np.log(arm.seconds) for arm in case.arms])
        pilots[name] = CasePilot(
            name,
            other.round_s + float(np.median(each_s)),
            other.warm_up_s + warm_s,
            max(other.sd, sd),
            len(each_s),
        )
    return list(pilots.values())


def _round_s(
    case: CaseRounds, measure_round: MeasureRound, order: random.Random, clock: Clock
) -> float:
    arms, start = [arm.prepared.arm for arm in case.arms], clock()
    measure_round(case, [(a, n) for n, a in enumerate(order.sample(arms, len(arms)))])
    return clock() - start


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
