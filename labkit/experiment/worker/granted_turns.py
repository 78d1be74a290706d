"""Granted turns: the turn order of a live worker, whose coordinator grants each turn.

The time in which this process waits for a turn, stopped by the coordinator, is not counted in any
stage (:class:`labkit.experiment.worker.run_draft.StageTimer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from labkit.experiment.worker.run_draft import StageTimer
from labkit.experiment.worker.turn_protocol import Channel, Message
from labkit.workload.arm_clocks import ArmClock, LiveClock
from labkit.workload.turn_order import Part, Round


class GrantedTurns:
    """A ``TurnOrder`` that passes on the turns of a coordinator to the only arm of this process.

    ``timer`` pauses while this process waits for a turn. ``stopped_s`` returns the seconds for
    which it has been stopped so far.
    """

    other_processes = True

    def __init__(self, channel: Channel, timer: StageTimer, stopped_s: Callable[[], float]) -> None:
        self._channel, self._timer, self._stopped_s = channel, timer, stopped_s
        self.slice_s = 0.0  # of the current turn

    def clock(self) -> ArmClock:
        return LiveClock(self._stopped_s)

    def ask(self, verb: str, value: Any, *answers: str) -> Message:
        """Send a message, and return the reply, which must have one of the verbs ``answers``."""
        with self._timer.paused():
            self._channel.send(verb, value)
            return self._channel.expect(*answers)

    def rounds(self, parts: Sequence[Part]) -> Iterator[Round]:
        """Yield the rounds that are granted, each with only this process's arm."""
        index = {part.name: number for number, part in enumerate(parts)}
        counts = [[part.name, part.rounds] for part in parts]
        verb, turn = self.ask("parts", counts, "turn", "end")
        while verb == "turn":
            name, position = turn
            yield Round(index[name], ((0, position),))
            verb, turn = self.ask("done", None, "turn", "end")

    def slices(self, unfinished: Callable[[], list[int]]) -> Iterator[int]:
        """Yield 0, the index of the only arm, for each granted slice until the arm has finished."""
        _, self.slice_s = self.ask("slices", None, "turn")
        while unfinished():
            yield 0
            if unfinished():
                _, self.slice_s = self.ask("done", None, "turn")

    def gather(self, values: Sequence[Any]) -> tuple[list[Any], int]:
        _, (gathered, first) = self.ask("values", list(values), "gathered")
        return gathered, first
