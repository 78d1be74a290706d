"""Coordinate a live set: give the arms' processes turns, and stop (SIGSTOP) those that have none.

A live set has one process per arm of a block. All are alive, but only one works at a time. They
start and load together, warm up one after the other, take turns in the order that
:class:`labkit.workload.turn_order.RandomTurnOrder` draws, and end one by one. While a process has
no turn, it is stopped with all its descendants, so that neither its idle threads, nor a step that
it computes ahead, nor a process that it has started takes time from another arm's turn. A server
that labkit did not start is stopped too if ``engine.server.pause`` is set. The unit of inference is
the set, just as it is the process if all arms share a process.

An arm whose process ends has no further turns; the others finish. The coordinator runs in the
parent's process. It waits with ``select`` while a worker works.

A process's clock (:class:`labkit.workload.arm_clocks.LiveClock`) stands still while the process is
stopped, and runs otherwise. What an arm computes between two steps, in another thread or in its
server, takes time on this clock, and is interrupted by the end of a turn without loss.
So ctrl-Z takes effect when the arm that has the turn has been stopped at its end. In another stage
that takes more than a second it takes effect at once; the arm then ends the stage, and waits.

However the coordinator ends, the workers are killed, even stopped ones, and servers that labkit did
not start continue. After a signal or an error the coordinator does this itself. If the coordinator
is killed, another process does it (:mod:`labkit.machine.processes.process_reaper`).
"""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.experiment import StudyError
from labkit.experiment.launch.child_process import (
    ChildProcess,
    ProcessExit,
    Ticker,
    await_signal_of_job,
)
from labkit.experiment.launch.interrupt_signals import InterruptSignals
from labkit.experiment.worker.turn_protocol import VERSION, Channel, Message, ProtocolError, encode
from labkit.experiment.worker.worker_status import SharedStatus
from labkit.machine.processes.process_reaper import ProcessReaper
from labkit.machine.processes.process_tree import ProcessTree
from labkit.machine.processes.same_core_pinning import ThreadPlacement
from labkit.machine.worker_environment import TAKES_TURNS
from labkit.workload.turn_order import Part, RandomTurnOrder

# Seconds of a slice, as in one process. The paired differences of two arms (chat, model=tiny, two
# cores, four studies of six sets) varied by 2.2 % (root mean square), with 0.1 s by 3.3 %.
SLICE_S = 0.03
# If an arm is a server: its first steps are slower (4,000, 4,500 and 4,800 tok/s with 0.03, 0.05
# and 0.1 s), and with longer slices, copies seem to vary more (docs/sensitivity.md).
LONG_SLICE_S = 0.05
TURNS_PER_PLACEMENT = 5


@dataclass(frozen=True)
class LiveCommand:
    """How a worker is started."""

    command: tuple[str, ...]  # ``--turns FD`` is appended to it
    environment: Mapping[str, str]
    log: Path
    status: SharedStatus  # which the worker inherits; the durations of its stops are written to it
    timeout_s: float  # seconds of work after which it is killed; time without a turn does not count
    # The ids of server processes that labkit did not start. They and their descendants are stopped
    # together with the worker, but never killed.
    servers: tuple[int, ...] = ()


class LiveWorker:
    """A worker process of the set. It is stopped except while it answers a message.

    ``ending``: how the process ended; None while it is alive.
    """

    def __init__(
        self, command: LiveCommand, signals: InterruptSignals, cleanup: ProcessReaper
    ) -> None:
        own, theirs = socket.socketpair()
        with theirs:
            turns = ("--turns", str(theirs.fileno()))
            self._child = ChildProcess(
                (*command.command, *turns),
                signals,
                environment={**command.environment, **command.status.environment, TAKES_TURNS: "1"},
                log=command.log,
                pass_fds=(theirs.fileno(), command.status.fd),
            )
        cleanup.kill_at_exit(self._child.pid)
        self._servers = [ProcessTree(pid, whole_group=False) for pid in command.servers]
        for pid in command.servers:
            cleanup.resume_at_exit(pid)
        self._cleanup, self._watched = cleanup, [self._child.pid, *command.servers]
        self._signals = signals
        self._status = command.status
        self._stopped_at: float | None = None
        self._channel = Channel(own)
        self._left_s = command.timeout_s  # working time that is left
        self.ending: ProcessExit | None = None

    @property
    def alive(self) -> bool:
        return self.ending is None

    @property
    def pids(self) -> list[int]:
        return self._child.tree.pids

    def send(self, ticker: Ticker, verb: str, value: Any = None) -> None:
        """Send a message and let the process continue.

        The process reads nothing while it is stopped. So it continues before a message is sent
        whose length exceeds what the connection holds.
        """
        rest = self._send_at_once(memoryview(encode(verb, value)))
        self._resume()
        while rest and not self._child.ended:
            if self._wait(ticker, writing=[self._channel.fileno()]):
                self.close(timed_out=True)
            else:
                rest = self._send_at_once(rest)

    def _send_at_once(self, data: memoryview) -> memoryview:
        """Send what the connection takes, and return the rest; nothing if the process has ended."""
        try:
            return self._channel.send_at_once(data)
        except OSError:
            return data[:0]

    def answer(self, ticker: Ticker) -> Message:
        """Return the next message, and stop the process; ``("ended", None)`` if it has ended."""
        timed_out = self._wait(ticker, [self._channel.fileno()])
        message = None if timed_out else self._channel.receive()
        if message is None:
            self.close(timed_out=timed_out or self._wait(ticker))
            return "ended", None
        self._stop()
        self._signals.suspend_if_due()
        ticker.tick(time.monotonic())
        return message

    def _wait(self, ticker: Ticker, fds: Sequence[int] = (), writing: Sequence[int] = ()) -> bool:
        """Wait as ``ChildProcess.wait_or_abort`` does, for the working time that is left."""
        start = self._child.now()
        timed_out = self._child.wait_or_abort(start + self._left_s, ticker, fds, writing)
        self._left_s -= self._child.now() - start
        return timed_out

    def _stop(self) -> None:
        """Stop the process and its servers, and register their new descendants for the cleanup.

        The clock stands still as soon as the process and its group are stopped. Processes outside
        the group stop as much later as they continued later.
        """
        self._stopped_at = self._child.tree.signal(signal.SIGSTOP)
        for server in self._servers:
            server.signal(signal.SIGSTOP)
        self._child.await_stop()
        for pid in self._child.tree.stop_new():
            self._cleanup.kill_at_exit(pid)
            self._watched.append(pid)
        for server in self._servers:
            for pid in server.stop_new():
                self._cleanup.resume_at_exit(pid)
                self._watched.append(pid)

    def _resume(self) -> None:
        """Let the process and its servers continue, after the duration of the stop is written."""
        trees = (self._child.tree, *self._servers)  # in the order of their stop
        for tree in trees:
            tree.search()
        if self._stopped_at is not None:
            self._status.add_stop(time.perf_counter() - self._stopped_at)
            self._stopped_at = None
        for tree in trees:
            tree.signal(signal.SIGCONT)

    def close_if_ended(self) -> None:
        """Note the end of a process that has ended without having a turn."""
        if self.alive and self._child.ended:
            self.close()

    def close(self, *, timed_out: bool = False) -> None:
        """Kill the process and its descendants if it is alive, and note how it ended."""
        if self.ending is None:
            self._channel.close()
            for server in self._servers:
                server.resume()
            self.ending = self._child.close(timed_out=timed_out)
            for pid in self._watched:
                self._cleanup.release(pid)


@dataclass
class LiveSet:
    """The processes of one block; ``run`` grants all their turns.

    ``workers``: by the name of their arm, in the order in which they were started. The other
    parameters are those of the function :func:`run`.
    """

    workers: Mapping[str, LiveWorker]
    order: random.Random
    signals: InterruptSignals
    on_tick: Callable[[], None]
    slice_s: float = SLICE_S
    load_together: bool = True

    def __post_init__(self) -> None:
        self._workers = list(self.workers.values())
        self._placement = ThreadPlacement()
        self._turns = [0] * len(self._workers)
        self._ticker = Ticker(self._tick)
        self._active_arm: int | None = None  # the arm that has the turn
        self._in_turn = False

    def run(self) -> None:
        """Greet the workers, let them load, grant all turns, and wait for every process to end."""
        self._greet()
        arms = range(len(self._workers))
        for arm in arms:
            self._ask(arm, "probe")
        self._load(arms)
        answers = {arm: self._ask(arm, "warm_up") for arm in arms}
        while answers := {arm: one for arm, one in answers.items() if one[0] != "ended"}:
            answers = self._take_stage(answers)

    def _load(self, arms: Sequence[int]) -> None:
        for together in [arms] if self.load_together else [[arm] for arm in arms]:
            for arm in together:
                self._send(arm, "load")
            for arm in together:
                self._answer(arm)

    def _greet(self) -> None:
        """Wait until all processes have started, and check that they use this protocol."""
        for arm, (name, worker) in enumerate(self.workers.items()):
            self._active_arm = arm
            if not worker.alive:
                continue
            verb, version = worker.answer(self._ticker)
            if verb == "hello" and version != VERSION:
                raise StudyError(
                    f"arm {name}: its worker uses version {version} of the turn protocol, and "
                    f"this labkit uses version {VERSION}; set design.isolation=process"
                )

    def _tick(self) -> None:
        """Call ``on_tick``, and close workers that something has killed while they had no turn.

        A server that such a worker has started would otherwise stay stopped until the next turn.
        During a turn ctrl-Z waits, so that it is not in what the arm times, nor on its clock.
        """
        if not self._in_turn:
            self.signals.suspend_if_due()
        self.on_tick()
        for arm, worker in enumerate(self._workers):
            if arm != self._active_arm:
                worker.close_if_ended()

    def _ask(self, arm: int, verb: str, value: Any = None) -> Message:
        """Send a message to a worker and return its answer; ``("ended", None)`` if it has ended."""
        self._send(arm, verb, value)
        return self._answer(arm)

    def _send(self, arm: int, verb: str, value: Any = None) -> None:
        self._active_arm, self._in_turn = arm, verb == "turn"
        if self._workers[arm].alive:
            self._workers[arm].send(self._ticker, verb, value)

    def _answer(self, arm: int) -> Message:
        worker, self._active_arm = self._workers[arm], arm
        return worker.answer(self._ticker) if worker.alive else ("ended", None)

    def _take_stage(self, answers: Mapping[int, Message]) -> dict[int, Message]:
        """Run the stage that the workers are ready for, and return their next answers by arm."""
        values = {arm: value for arm, (_, value) in answers.items()}
        verbs = {verb for verb, _ in answers.values()}
        if verbs == {"parts"}:
            self._take_rounds({arm: dict(parts) for arm, parts in values.items()})
            self._release_threads()
            return {arm: self._ask(arm, "end") for arm in self._shuffled(answers)}
        if verbs == {"slices"}:
            return self._take_slices(list(answers))
        if verbs == {"values"}:
            return self._exchange(values)
        raise ProtocolError(
            "turn protocol: the arms are at different stages: "
            f"workers sent {' and '.join(sorted(verbs))}"
        )

    def _take_rounds(self, counts: Mapping[int, Mapping[str, int]]) -> None:
        """Run all rounds of all parts. ``counts``: by arm, the number of rounds by part name."""
        names = dict.fromkeys(name for parts in counts.values() for name in parts)
        parts = []
        for name in names:
            arms = tuple(sorted(arm for arm in counts if name in counts[arm]))
            parts.append(Part(name, counts[arms[0]][name], arms))
        for now in RandomTurnOrder(self.order).rounds(parts):
            for arm, position in now.turns:
                self._grant_turn(arm, [parts[now.part].name, position])

    def _grant_turn(self, arm: int, value: Any) -> Message:
        if self._workers[arm].alive and self._turns[arm] % TURNS_PER_PLACEMENT == 0:
            self._placement.place(arm, self._workers[arm].pids)
        self._turns[arm] += 1
        return self._ask(arm, "turn", value)

    def _release_threads(self) -> None:
        for arm, worker in enumerate(self._workers):
            self._placement.release(arm, worker.pids)

    def _take_slices(self, arms: Sequence[int]) -> dict[int, Message]:
        """Grant slices until every arm has finished, and return the arms' last answers."""
        finished: dict[int, Message] = {}

        def unfinished() -> list[int]:
            return [arm for arm in arms if self._workers[arm].alive and arm not in finished]

        for arm in RandomTurnOrder(self.order).slices(unfinished):
            answer = self._grant_turn(arm, self.slice_s)
            if answer[0] != "done":
                finished[arm] = answer
        self._release_threads()
        return {arm: finished[arm] for arm in arms if arm in finished}

    def _exchange(self, values: Mapping[int, Sequence[Any]]) -> dict[int, Message]:
        """Send the values of all arms to each arm, and return the arms' next answers."""
        gathered: list[Any] = []
        first: dict[int, int] = {}  # the index of an arm's first value
        for arm in sorted(values):
            first[arm] = len(gathered)
            gathered += values[arm]
        shuffled = self._shuffled(values)
        return {arm: self._ask(arm, "gathered", [gathered, first[arm]]) for arm in shuffled}

    def _shuffled(self, arms: Mapping[int, Any]) -> list[int]:
        return self.order.sample(sorted(arms), len(arms))


def run(
    commands: Mapping[str, LiveCommand],
    *,
    order: random.Random,
    on_tick: Callable[[], None],
    slice_s: float = SLICE_S,
    load_together: bool = True,
) -> list[ProcessExit]:
    """Run the processes of a set to their ends; return how each ended, ordered as ``commands``.

    ``commands``: by arm, in the order in which the processes are started. ``order``: the random
    stream for the order of turns. ``on_tick`` is called about once a second. ``slice_s``: seconds
    of a turn of an engine or a server. ``load_together``: whether the processes load at the same
    time, or one after the other.

    Raises ``Interrupted`` after a signal, when all processes have been killed; ``StudyError`` if a
    worker uses another version of the protocol, or violates it; ``OSError`` if a log can't be
    written or a command can't be started.
    """
    workers: dict[str, LiveWorker] = {}
    with InterruptSignals(defer_suspension=True) as signals:
        with ExitStack() as stack:
            cleanup = stack.enter_context(ProcessReaper())
            for name, command in commands.items():
                workers[name] = LiveWorker(command, signals, cleanup)
                stack.callback(workers[name].close)
            LiveSet(workers, order, signals, on_tick, slice_s, load_together).run()
        endings = [worker.ending for worker in workers.values() if worker.ending is not None]
        await_signal_of_job(endings, signals)
    signals.check()
    return endings
