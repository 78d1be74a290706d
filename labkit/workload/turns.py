"""Several arms in one process, taking turns: what a kind of workload offers for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from labkit.workload.measurement import Measurement


class Turn(Protocol):
    """Begins an arm's turn."""

    def __call__(self, arm: int) -> AbstractContextManager[None]:
        """Enter the turn of the arm of that index.

        Whose time it is, who is to blame for what goes wrong in it, and its CPU budget
        (numba threads) are set.
        """


class Turns(Protocol):
    """Several arms' workload made ready in one process, taking turns."""

    def warm_up(self) -> None:
        """Do a fixed amount of every arm's work, unmeasured, each in a turn of its own."""

    def measure(self, beat: Callable[[str], None]) -> Sequence[Measurement]:
        """Do every arm's work in turns and time it; ``beat`` is told how far it is.

        Returns
        -------
        sequence of Measurement
            One per arm, in the order of the arms. ``Metric.repeats`` are of equal length
            and aligned: repeat i of every arm was taken in the same round.
        """

    def close(self) -> None:
        """Release what is held."""
