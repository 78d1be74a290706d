"""Request workloads interleaved in one process: the arms run slices of engine steps in turn.

Every arm has its own engine, requests and clock. The clock stops during the others' turns, so
arrivals and latencies are in the arm's own time. Changes of the machine that last longer than a
round of slices affect all arms alike. Time that a stall adds to a step is subtracted
(:mod:`labkit.workload.machine_stalls`). The record also holds the times as measured.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from labkit.workload import machine_stalls
from labkit.workload.arm_clock import ArmClock
from labkit.workload.load_generator import LoadGenerator
from labkit.workload.measurement import Measurement
from labkit.workload.serving_session import ServingSession
from labkit.workload.workload_kind import EnterTurn

# A slice ends with the first step that ends after this much of its arm's time. Shorter slices lose
# more time to cold caches. In longer slices the machine may change from one arm to the next.
SLICE_S = 0.03


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


class InterleavedServing:
    """Request workloads that take turns.

    Parameters
    ----------
    arms
        Sessions ready to warm up; ``close`` closes them.
    order
        Random stream that draws the order of the arms in every round.
    turn
        Context manager for an arm's turn; see ``EnterTurn``.
    """

    def __init__(self, arms: Sequence[ServingArm], order: random.Random, turn: EnterTurn) -> None:
        self._arms = tuple(arms)
        self._order = order
        self._turn = turn

    def warm_up(self) -> None:
        """Warm up every arm; see ``ServingSession.warm_up``."""
        gc.collect()  # takes about 0.1 s, which must not appear in a client's latencies
        for index, arm in enumerate(self._arms):
            with self._turn(index), arm.clock.running():
                arm.session.warm_up()
                arm.session.drain()

    prepare = warm_up

    def measure(self, heartbeat: Callable[[str], None]) -> list[Measurement]:
        """Serve every arm's requests once; see ``InterleavedArms``.

        A single arm has one turn, from its first request to its last token. Loaded objects are
        frozen, so that the garbage collector does not pause a step to scan them.
        """
        gc.freeze()
        try:
            return self._measure(heartbeat)
        finally:
            gc.unfreeze()

    def _measure(self, heartbeat: Callable[[str], None]) -> list[Measurement]:
        if len(self._arms) == 1:
            (arm,) = self._arms
            with self._turn(0), arm.clock.running():
                return [arm.session.measure(heartbeat)]
        progress = [ServingProgress(arm.session.start(heartbeat)) for arm in self._arms]
        while unfinished := [i for i, one in enumerate(progress) if not one.generator.done]:
            self._order.shuffle(unfinished)
            for index in unfinished:
                with self._turn(index):
                    self._run_slice(self._arms[index], progress[index])
        measurements = []
        for index, stalled_s in enumerate(_stalled_seconds(progress)):
            with self._turn(index):
                session = self._arms[index].session
                measurements.append(session.measurement(progress[index].generator, stalled_s))
        return measurements

    def _run_slice(self, arm: ServingArm, progress: ServingProgress) -> None:
        """Run engine steps until the slice's time is over or all requests have ended."""
        clock, generator = arm.clock, progress.generator
        end = clock() + SLICE_S
        while not generator.done and clock() < end:
            with clock.running():
                stepped = generator.step()
            if stepped:
                progress.tokens.append(arm.session.computed_tokens())
        with clock.running():
            arm.session.drain()

    def close(self) -> None:
        """Close every arm's engine."""
        for arm in self._arms:
            arm.session.close()


def _stalled_seconds(progress: Sequence[ServingProgress]) -> list[NDArray[np.float64]]:
    """Return the seconds that each step of each arm lost to stalls."""
    times = [arm.generator.step_seconds() for arm in progress]
    schedules = [[step.receivers for step in arm.generator.steps] for arm in progress]
    if len(progress) > 1 and all(schedule == schedules[0] for schedule in schedules):
        return list(machine_stalls.by_same_step(np.stack(times)))
    return [
        machine_stalls.by_similar_steps(own, np.diff(arm.tokens, prepend=0.0))
        for arm, own in zip(progress, times, strict=True)
    ]
