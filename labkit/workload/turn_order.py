"""Turn order: which arm measures next, and in which part of its measurement.

The arms that take turns share a process, or each has a process of its own. In both cases
:class:`RandomTurnOrder` draws the order: in the process that the arms share, or in the coordinator
of their processes (:mod:`labkit.experiment.launch.turn_coordinator`). If every arm has its own
process, the ``TurnOrder`` of each worker gives its only arm the turns that the coordinator has
granted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from labkit.workload.arm_clocks import ArmClock


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a measurement, such as a kernel case: a number of rounds of the same arms.

    In each round, every arm has one turn. ``arms`` has the arms' indices.
    """

    name: str
    rounds: int
    arms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of the part with the index ``part``.

    ``turns``: pairs of an arm's index and the arm's position in the round, both from 0.
    """

    part: int
    turns: tuple[tuple[int, int], ...]


class TurnOrder(Protocol):
    """Gives the arms of a process their turns, and lets them exchange values."""

    @property
    def slice_s(self) -> float:
        """The seconds that a turn lasts, if the arms have slices instead of rounds."""

    @property
    def other_processes(self) -> bool:
        """Whether arms of other processes have turns as well."""

    def clock(self) -> ArmClock:
        """Return a new clock that runs during an arm's turns."""

    def rounds(self, parts: Sequence[Part]) -> Iterator[Round]:
        """Yield every round. The turns of a round are over when the next round is requested."""

    def slices(self, unfinished: Callable[[], list[int]]) -> Iterator[int]:
        """Yield the arm that has the next slice, until ``unfinished`` returns no arm.

        A slice is over when the next one is requested.
        """

    def gather(self, values: Sequence[Any]) -> tuple[list[Any], int]:
        """Exchange one JSON value per arm when all arms have finished.

        Returns the values of all arms in all processes, and the index of this process's first arm.
        """


class RandomTurnOrder:
    """Draws the order of turns of all arms from a random stream.

    A turn is one of a ``Round`` of a ``Part`` or, with requests, a slice of ``slice_s`` seconds.
    Rounds of all parts are spread over the whole measurement. With n arms in a part, each arm has
    every position once in n rounds. This matters because the first arm of a round starts with the
    caches that another part left behind.
    """

    # Shorter slices lose more time to cold caches. In longer slices the machine may change from
    # one arm to the next.
    slice_s = 0.03
    other_processes = False

    def __init__(self, order: random.Random) -> None:
        self._order = order

    def clock(self) -> ArmClock:
        return ArmClock()

    def rounds(self, parts: Sequence[Part]) -> Iterator[Round]:
        pending: list[list[list[int]]] = [[] for _ in parts]
        for index in spread_rounds([part.rounds for part in parts], self._order):
            if not pending[index]:
                pending[index] = self._balanced_orders(parts[index].arms)
            arms = pending[index].pop()
            yield Round(index, tuple((arm, position) for position, arm in enumerate(arms)))

    def _balanced_orders(self, arms: Sequence[int]) -> list[list[int]]:
        drawn = self._order.sample(arms, len(arms))
        orders = [drawn[k:] + drawn[:k] for k in range(len(drawn))]
        self._order.shuffle(orders)
        return orders

    def slices(self, unfinished: Callable[[], list[int]]) -> Iterator[int]:
        while arms := unfinished():
            self._order.shuffle(arms)
            yield from arms

    def gather(self, values: Sequence[Any]) -> tuple[list[Any], int]:
        return list(values), 0


def spread_rounds(counts: Sequence[int], order: random.Random) -> list[int]:
    """Return the order of all rounds as indices of parts; part ``c`` appears ``counts[c]`` times.

    The schedule is divided into ``n`` equal sections for a part of ``n`` rounds, and round ``i``
    falls at random into section ``i``. So every part is spread over the whole schedule.
    """
    when = [((i + order.random()) / n, index) for index, n in enumerate(counts) for i in range(n)]
    return [index for _, index in sorted(when)]
