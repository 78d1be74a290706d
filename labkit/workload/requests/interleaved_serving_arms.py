"""Interleaved request workloads: the arms run slices of engine steps in turn.

Every arm has its own engine, requests and clock. The clock stops during the others' turns, so
arrivals and latencies are in the arm's own time. Changes of the machine that last longer than a
round of slices affect all arms alike. Time that a stall adds to a step (``stalled_seconds``) is
subtracted, whether or not arms of other processes take turns with those of this process. The record
also holds the times before this subtraction.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.workload.arm_clocks import ArmClock
from labkit.workload.requests.load_generator import LoadGenerator
from labkit.workload.requests.serving_session import ServingSession
from labkit.workload.turn_order import TurnOrder
from labkit.workload.workload_protocols import EnterTurn, Measurement

SPIKE_RATIO, ROUGH_SPIKE_RATIO = 1.3, 3.0  # of the expected time
MIN_EXCESS_S = 0.002  # a smaller excess is not a stall
NEIGHBOURS = 21  # steps of about the same length
SIMILAR_RATIO, MIN_SIMILAR_STEPS = 1.25, 8  # largest ratio of tokens; number of steps

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ServingArm:
    """One arm: its serving session, and the clock that times it."""

    session: ServingSession
    clock: ArmClock


@dataclass(slots=True)
class ServingProgress:
    """One arm's progress. ``tokens``: total tokens computed by the end of each step."""

    generator: LoadGenerator
    tokens: list[float] = field(default_factory=list)

    def step_times(self) -> dict[str, Any]:
        """Return ``seconds`` and computed ``tokens`` of each step so far, as JSON types.

        ``schedule``: digest of the requests that received tokens in each step.
        """
        receivers = repr([step.receivers for step in self.generator.steps])
        return {
            "seconds": self.generator.step_seconds().tolist(),
            "tokens": np.diff(self.tokens, prepend=0.0).tolist(),
            "schedule": hashlib.sha256(receivers.encode()).hexdigest(),
        }


class InterleavedServing:
    """Request workloads that take turns.

    ``arms``: sessions ready to warm up; ``close`` closes them. ``order``: gives the arms their
    turns. ``turn``: context manager for an arm's turn; see ``EnterTurn``.
    """

    def __init__(self, arms: Sequence[ServingArm], order: TurnOrder, turn: EnterTurn) -> None:
        self._arms = tuple(arms)
        self._order = order
        self._turn = turn

    def warm_up(self) -> None:
        gc.collect()  # takes about 0.1 s, which must not appear in a client's latencies
        for index, arm in enumerate(self._arms):
            with self._turn(index), arm.clock.running():
                arm.session.warm_up()
                arm.session.drain()

    prepare = warm_up

    def measure(self, heartbeat: Callable[[str], None]) -> list[Measurement]:
        """Serve every arm's requests once; see ``InterleavedArms``.

        Without other arms to take turns with, an arm has a single turn, from its first request to
        its last token. Loaded objects are frozen, so that the garbage collector does not pause a
        step to scan them.
        """
        gc.freeze()
        try:
            return self._with_step_parts(self._measure(heartbeat), heartbeat)
        finally:
            gc.unfreeze()

    def _with_step_parts(
        self, measurements: Sequence[Measurement], heartbeat: Callable[[str], None]
    ) -> list[Measurement]:
        """Serve requests again, with clocks on the parts of steps, and note the parts' times.

        The measurements are complete by then: no turn with clocks enters them.
        """
        clocked = {}
        for index, arm in enumerate(self._arms):
            if arm.session.has_clocks:
                with self._turn(index):
                    clocked[index] = arm.session.start_clocked(heartbeat)

        def unfinished() -> list[int]:
            return [index for index, serving in clocked.items() if not serving.done]

        for index in self._order.slices(unfinished) if clocked else ():
            arm, serving = self._arms[index], clocked[index]
            with self._turn(index):
                self._run_slice(arm, ServingProgress(serving.generator))
        return [
            replace(one, notes={**one.notes, "step_parts": clocked[index].note()})
            if index in clocked
            else one
            for index, one in enumerate(measurements)
        ]

    def _measure(self, heartbeat: Callable[[str], None]) -> list[Measurement]:
        if len(self._arms) == 1 and not self._order.other_processes:
            (arm,) = self._arms
            with self._turn(0), arm.clock.running():
                return [arm.session.measure(heartbeat)]
        progress = [ServingProgress(arm.session.start(heartbeat)) for arm in self._arms]

        def unfinished() -> list[int]:
            return [i for i, one in enumerate(progress) if not one.generator.done]

        for index in self._order.slices(unfinished):
            with self._turn(index):
                self._run_slice(self._arms[index], progress[index])
        gathered, first = self._order.gather([one.step_times() for one in progress])
        stalled = stalled_seconds(gathered)[first:]
        measurements = []
        for index, one in enumerate(progress):
            with self._turn(index):
                session = self._arms[index].session
                stalls = None if session.is_remote else stalled[index]
                measurements.append(session.measurement(one.generator, stalls))
        return measurements

    def _run_slice(self, arm: ServingArm, progress: ServingProgress) -> None:
        """Run engine steps until the slice's time is over or all requests have ended.

        A step in flight is waited for only if another arm of this process is next. A process that
        is stopped between its turns goes on with the step in its next turn.
        """
        clock, generator = arm.clock, progress.generator
        end = clock() + self._order.slice_s
        while not generator.done and clock() < end:
            with clock.running():
                stepped = generator.step(end)
            if stepped:
                progress.tokens.append(arm.session.computed_tokens())
        if not self._order.other_processes:
            with clock.running():
                arm.session.drain()

    def close(self) -> None:
        for arm in self._arms:
            arm.session.close()


def stalled_seconds(arms: Sequence[Mapping[str, Any]]) -> list[Array]:
    """Return the seconds that stalls of the machine added to each step of each arm, by arm.

    ``arms``: see ``ServingProgress.step_times``. A stall falls into one arm's turn, and a ratio of
    total times would charge it to that arm. Stalls only add time, and only to a few steps. So a
    step that took more than ``SPIKE_RATIO`` times its expected time is counted with the expected
    time. Every other step counts as measured.

    If all arms ran the same schedule, step j of one arm computed the same as step j of another. The
    expected time is then the time of another arm's step j, multiplied by the median ratio of the
    two arms' times in steps of about the same length. So a speed-up or slowdown of one kind of step
    is preserved. With several other arms, the smallest of these times is the expected time.

    If the schedules differ, the expected time is the median of the same arm's steps that computed
    about as many tokens. This estimate is rougher, so only a step over ``ROUGH_SPIKE_RATIO`` times
    its expected time counts as a spike. A step with few similar steps (a long prefill) counts as
    measured.

    Work that an arm does in a few of its steps (compaction, copies, eviction) looks like a stall,
    too. The times of a single process cannot tell the two apart, but those of many processes can
    (:mod:`labkit.analysis.comparison.machine_or_arm_stalls`).

    Measured with ``workload=chat`` and ``model=tiny`` on two cores, in 8 processes: a planted
    difference of 3 % is estimated as 3.0 % (from total times: 2.7 %). The paired standard deviation
    between processes of a copy of the baseline is 1.0 % (0.9 %) on the idle machine, and 2.2 %
    (5.9 %) beside a busy process, with OpenMP's pool.
    """
    times = [np.array(arm["seconds"]) for arm in arms]
    if len(arms) > 1 and len({arm["schedule"] for arm in arms}) == 1:
        return list(by_same_step(np.stack(times)))
    return [
        by_similar_steps(own, np.array(arm["tokens"])) for arm, own in zip(arms, times, strict=True)
    ]


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
