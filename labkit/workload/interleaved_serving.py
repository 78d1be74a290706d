"""Request arms in one process: slices of whole engine steps, in random order, round by round.

Every arm has an engine, requests and a clock of its own; the clock stands still in the
others' turns, so arrivals and latencies are those of the arm's own time. What the machine
does in a second happens to all arms alike, and what a stall adds to a step is taken out
again (:mod:`labkit.workload.noise_spikes`); the times with it are kept beside.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from labkit.workload import noise_spikes
from labkit.workload.arm_clock import ArmClock
from labkit.workload.interleaving import EnterTurn
from labkit.workload.load_generator import LoadGenerator
from labkit.workload.measurement import Measurement
from labkit.workload.serving_session import ServingSession

# A slice goes on until so much of its arm's time has passed; a step is never cut. Shorter ones
# pay more for the caches that the others leave behind, longer ones let the machine change.
SLICE_S = 0.03


@dataclass(frozen=True, slots=True)
class Seat:
    """An arm: its session, and the clock by which it serves."""

    session: ServingSession
    clock: ArmClock


@dataclass(slots=True)
class Progress:
    """An arm's requests on their way: ``tokens`` had been computed when each step ended."""

    generator: LoadGenerator
    tokens: list[float] = field(default_factory=list)


class InterleavedServing:
    """Request workloads that take turns.

    Parameters
    ----------
    seats
        The arms, ready to warm up; closed with this.
    order
        Draws every round's order.
    turn
        Begins an arm's turn.
    """

    def __init__(self, seats: Sequence[Seat], order: random.Random, turn: EnterTurn) -> None:
        self._seats = tuple(seats)
        self._order = order
        self._turn = turn

    def warm_up(self) -> None:
        """Warm every arm up; see ``ServingSession.warm_up``."""
        gc.collect()  # takes some 0.1 s, which nobody is to find among a client's times
        for arm, seat in enumerate(self._seats):
            with self._turn(arm), seat.clock.running():
                seat.session.warm_up()
                seat.session.drain()

    prepare = warm_up

    def measure(self, beat: Callable[[str], None]) -> list[Measurement]:
        """Serve every arm's requests once; see ``InterleavedArms``.

        An arm alone has one turn, from its first request to its last token. What was loaded is
        kept from the garbage collector, which would stop whatever runs while it looks through it.
        """
        gc.freeze()
        try:
            return self._measure(beat)
        finally:
            gc.unfreeze()

    def _measure(self, beat: Callable[[str], None]) -> list[Measurement]:
        if len(self._seats) == 1:
            (seat,) = self._seats
            with self._turn(0), seat.clock.running():
                return [seat.session.measure(beat)]
        arms = [Progress(seat.session.begin(beat)) for seat in self._seats]
        while unfinished := [index for index, arm in enumerate(arms) if not arm.generator.done]:
            self._order.shuffle(unfinished)
            for index in unfinished:
                with self._turn(index):
                    self._slice(self._seats[index], arms[index])
        measured = []
        for index, lost in enumerate(_lost(arms)):
            with self._turn(index):
                measured.append(self._seats[index].session.measured(arms[index].generator, lost))
        return measured

    def _slice(self, seat: Seat, arm: Progress) -> None:
        clock = seat.clock
        end = clock() + SLICE_S
        while not arm.generator.done and clock() < end:
            with clock.running():
                stepped = arm.generator.step()
            if stepped:
                arm.tokens.append(seat.session.computed_tokens())
        with clock.running():
            seat.session.drain()

    def close(self) -> None:
        """Close every arm's engine."""
        for seat in self._seats:
            seat.session.close()


def _lost(arms: Sequence[Progress]) -> list[NDArray[np.float64]]:
    """Return what every step of every arm lost to stalls, in seconds."""
    times = [arm.generator.step_seconds() for arm in arms]
    schedules = [[step.receivers for step in arm.generator.steps] for arm in arms]
    if len(arms) > 1 and all(schedule == schedules[0] for schedule in schedules):
        return list(noise_spikes.among_equals(np.stack(times)))
    return [
        noise_spikes.among_alike(own, np.diff(arm.tokens, prepend=0.0))
        for arm, own in zip(arms, times, strict=True)
    ]
