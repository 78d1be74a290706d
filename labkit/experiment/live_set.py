"""A live set: one process for each arm of a block, all alive at once, with one of them working.

The processes are started together. They load and warm up one after the other, take turns in the
order that :class:`labkit.workload.turn_order.RandomTurnOrder` draws, and end one by one. While a
process has no turn, its whole process group is stopped (SIGSTOP), so that neither its idle threads,
nor a step that it computes ahead, nor a process that it has started takes time from another arm's
turn. The unit of inference is the set, just as it is the process if all arms share a process.

An arm whose process ends has no further turns; the others finish. The coordinator runs in the
parent's process. It waits with ``select`` while a worker works.

Whatever ends the coordinator also ends the workers, even stopped ones. A signal or an error kills
their process groups. If the coordinator is killed, a watchdog kills them
(:mod:`labkit.machine.group_watchdog`).
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from labkit.experiment import StudyError
from labkit.experiment.child_process import (
    ChildProcess,
    ProcessExit,
    Ticker,
    await_signal_of_job,
)
from labkit.experiment.interrupt_signals import InterruptSignals
from labkit.experiment.turn_protocol import VERSION, Channel, Message
from labkit.machine.group_watchdog import GroupWatchdog
from labkit.workload.turn_order import Part, RandomTurnOrder

# Much longer than a step or a wake-up, and shorter than the changes of the machine's speed.
SLICE_S = 0.1


@dataclass(frozen=True)
class LiveCommand:
    """A worker's command, to which ``--turns FD`` is appended, its environment and its log."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


class LiveWorker:
    """A worker process of the set. It is stopped except while it answers a message.

    ``values``: what the arm sent for the other arms when it finished; None until then.
    ``ending``: how the process ended; None while it is alive.
    """

    def __init__(self, command: LiveCommand, timeout_s: float, watchdog: GroupWatchdog) -> None:
        own, theirs = socket.socketpair()
        with theirs:
            turns = ("--turns", str(theirs.fileno()))
            self._child = ChildProcess(
                (*command.command, *turns),
                environment=command.environment,
                log=command.log,
                pass_fds=(theirs.fileno(),),
            )
        watchdog.watch(self._child.pid)
        self._watchdog = watchdog
        self._channel = Channel(own)
        self._left_s = timeout_s  # of working time
        self.values: list[Any] | None = None
        self.ending: ProcessExit | None = None

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.ending is None

    def ask(self, verb: str, value: Any, signals: InterruptSignals, ticker: Ticker) -> Message:
        """Send a message, let the process continue until it answers, and stop it again.

        Returns
        -------
        Message
            The answer; ``("ended", None)`` if the process has ended.
        """
        self._child.resume()
        with contextlib.suppress(OSError):  # the process has ended
            self._channel.send(verb, value)
        return self.answer(signals, ticker)

    def answer(self, signals: InterruptSignals, ticker: Ticker) -> Message:
        """Wait for the next message, and stop the process."""
        start = time.monotonic()
        fds = [self._channel.fileno()]
        timed_out = self._child.wait(start + self._left_s, signals, ticker, fds)
        message = None if timed_out else self._channel.receive()
        if message is None:
            self._wait_for_the_end(timed_out, start, signals, ticker)
            return "ended", None
        self._child.stop()
        self._left_s -= time.monotonic() - start
        return message

    def _wait_for_the_end(
        self, timed_out: bool, start: float, signals: InterruptSignals, ticker: Ticker
    ) -> None:
        """Wait for a process that has closed its connection, and note how it ended."""
        if not timed_out:
            timed_out = self._child.wait(start + self._left_s, signals, ticker)
        self.close(timed_out=timed_out)

    def close(self, *, timed_out: bool = False) -> None:
        """Kill the process group if it is alive, and note how the process ended."""
        if self.ending is None:
            self._channel.close()
            self.ending = self._child.close(timed_out=timed_out)
            self._watchdog.release(self._child.pid)


class LiveSet:
    """The processes of one block; ``run`` does all their turns.

    Parameters
    ----------
    workers
        The workers by the name of their arm, in the order in which they load.
    order
        Random stream for the order of turns.
    """

    def __init__(
        self,
        workers: Mapping[str, LiveWorker],
        order: random.Random,
        signals: InterruptSignals,
        ticker: Ticker,
    ) -> None:
        self._names = list(workers)
        self._workers = list(workers.values())
        self._order = order
        self._signals = signals
        self._ticker = ticker

    def run(self) -> None:
        """Greet, load, do all turns, and wait for the end of every process."""
        self._greet()
        agendas = [self._ask(arm, "load") for arm in range(len(self._workers))]
        self._take_rounds(agendas)
        self._take_slices([arm for arm, (verb, _) in enumerate(agendas) if verb == "slices"])

    def _greet(self) -> None:
        """Wait until all processes have started, and check that they use this protocol."""
        for name, worker in zip(self._names, self._workers, strict=True):
            verb, version = worker.answer(self._signals, self._ticker)
            if verb == "hello" and version != VERSION:
                raise StudyError(
                    f"arm {name}: its worker uses version {version} of the turn protocol, and "
                    f"this labkit uses version {VERSION}; set design.isolation=process"
                )

    def _ask(self, arm: int, verb: str, value: Any = None) -> Message:
        """Send a message to a worker and return its answer; nothing is sent to an ended one."""
        worker = self._workers[arm]
        if not worker.alive:
            return "ended", None
        return worker.ask(verb, value, self._signals, self._ticker)

    def _take_rounds(self, agendas: Sequence[Message]) -> None:
        """Do all rounds of all parts, then let each process finish."""
        counts = {arm: dict(value) for arm, (verb, value) in enumerate(agendas) if verb == "parts"}
        names = dict.fromkeys(name for parts in counts.values() for name in parts)
        parts = []
        for name in names:
            arms = tuple(arm for arm in counts if name in counts[arm])
            parts.append(Part(name, counts[arms[0]][name], arms))
        for now in RandomTurnOrder(self._order).rounds(parts):
            for arm, position in now.turns:
                self._ask(arm, "turn", [parts[now.part].name, position])
        for arm in self._shuffled(counts):
            self._ask(arm, "end")

    def _take_slices(self, arms: Sequence[int]) -> None:
        """Do slices until every arm has finished, then exchange the arms' values."""

        def unfinished() -> list[int]:
            return [a for a in arms if self._workers[a].alive and self._workers[a].values is None]

        for arm in RandomTurnOrder(self._order).slices(unfinished):
            verb, value = self._ask(arm, "turn", SLICE_S)
            if verb == "values":
                self._workers[arm].values = value
        finished = {arm: v for arm in arms if (v := self._workers[arm].values) is not None}
        gathered = [value for values in finished.values() for value in values]
        firsts = accumulate((len(values) for values in finished.values()), initial=0)
        first = dict(zip(finished, firsts, strict=False))
        for arm in self._shuffled(finished):
            self._ask(arm, "gathered", [gathered, first[arm]])

    def _shuffled(self, arms: Sequence[int] | Mapping[int, Any]) -> list[int]:
        return self._order.sample(list(arms), len(arms))


def run(
    commands: Mapping[str, LiveCommand],
    *,
    order: random.Random,
    timeout_s: float,
    on_tick: Callable[[], None],
) -> list[ProcessExit]:
    """Run the processes of a set to their ends; return how each ended, in the given order.

    Parameters
    ----------
    commands
        By arm, in the order in which the processes load.
    order
        Random stream for the order of turns.
    timeout_s
        Seconds that each process may work, after which it is killed.
    on_tick
        Called about once a second.

    Raises
    ------
    Interrupted
        A signal was received; all process groups have been killed.
    StudyError
        A worker uses another version of the protocol, or violates it.
    OSError
        A log can't be written or a command can't be started.
    """
    workers: dict[str, LiveWorker] = {}
    with InterruptSignals() as signals:
        with ExitStack() as stack:
            watchdog = stack.enter_context(GroupWatchdog())
            for name, command in commands.items():
                workers[name] = LiveWorker(command, timeout_s, watchdog)
                stack.callback(workers[name].close)
            LiveSet(workers, order, signals, Ticker(on_tick)).run()
        endings = [worker.ending for worker in workers.values() if worker.ending is not None]
        await_signal_of_job(endings, signals)
    signals.check()
    return endings
