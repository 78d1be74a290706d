"""A child process: started in its own session, watched, and killed with all its descendants."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.experiment.launch.interrupt_signals import InterruptSignals
from labkit.machine.facts import linux
from labkit.machine.processes import process_memory_limit
from labkit.machine.processes.process_tree import ProcessTree, signal_name

TICK_S = 1.0
TRACEBACK_S = 0.5  # for a hanging worker to print its traceback (faulthandler on SIGABRT)
SUSPENDED_S = 5.0  # a wait that is so much too long: this process was stopped (ctrl-Z)
SIGNAL_S = 0.5  # for a signal of the whole job to arrive here, when it has ended a child
MIN_POLL_S, MAX_POLL_S = 0.0005, 0.05  # between checks of a child that is about to end
# Signals by which a cluster stops or warns a job; every process of the job gets them.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class ProcessExit:
    """The end of a process."""

    code: int  # its exit status, or minus the signal's number
    timed_out: bool
    oom_kills: int
    wall_s: float  # without ``suspended_s``
    # When this process was suspended (ctrl-Z) and could not see whether the child had ended.
    suspended_s: float = 0.0

    @property
    def signal_name(self) -> str | None:
        return None if self.code >= 0 else signal_name(-self.code)

    @property
    def killed_for_memory(self) -> bool:
        """Whether the kernel killed the process because memory ran out."""
        return self.code == -signal.SIGKILL and self.oom_kills > 0 and not self.timed_out


class Ticker:
    """Calls a function about once a second while children are watched."""

    def __init__(self, on_tick: Callable[[], None]) -> None:
        self._on_tick = on_tick
        self.due = time.monotonic() + TICK_S

    def tick(self, now: float) -> None:
        """Call the function if it is due at ``now`` (seconds, monotonic clock)."""
        if now >= self.due:
            self._on_tick()
            self.due = max(self.due + TICK_S, now)


class ChildProcess:
    """A child in its own session, with its output in ``log``; ``close`` ends all descendants.

    ``--parent PID --lifeline FD --spawned NS`` is appended to the command: the id of this process,
    a pipe that closes when this process ends, and the monotonic clock (ns) at the child's start.
    ``signals`` end every wait, and count the seconds in which this process was suspended. Raises
    ``OSError`` if the log can't be written or the command can't be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        signals: InterruptSignals,
        *,
        environment: Mapping[str, str],
        log: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        lifeline, self._lifeline_writer = os.pipe()
        self._done, done_writer = os.pipe()  # `_done` becomes readable when the child ends
        self._signals, self._suspended_before_s = signals, signals.suspended_s
        self._kills_before, self.started = _oom_kills(), self.now()
        try:
            log.unlink(missing_ok=True)  # a link is not followed
            with open(log, "xb") as output:
                arguments = ["--parent", os.getpid(), "--lifeline", lifeline]
                arguments += ["--spawned", time.monotonic_ns()]
                self._child = subprocess.Popen(
                    [*command, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                    pass_fds=(lifeline, done_writer, *pass_fds),
                )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(lifeline)
            os.close(done_writer)
        self.pid = self._child.pid
        self.tree = ProcessTree(self.pid, whole_group=True)

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def now(self) -> float:
        """Return the seconds of a clock that stands still while this process is suspended."""
        return time.monotonic() - self._signals.suspended_s

    def wait_or_abort(
        self,
        deadline: float,
        ticker: Ticker,
        fds: Sequence[int] = (),
        writing: Sequence[int] = (),
    ) -> bool:
        """Wait until the child ends, the deadline passes, or a descriptor is ready.

        ``deadline``: on the clock ``now``. ``fds``: ready when they are readable. ``writing``:
        ready when they are writable. ``ticker`` is called meanwhile; with descriptors, only after
        the first second. Returns whether the deadline has passed. If so, the child has received
        SIGABRT and has had time to print its traceback. Raises ``Interrupted`` after a signal.
        """
        # A child that will answer is timed: a tick would delay its stop, so the caller ticks then.
        quiet = time.monotonic() + TICK_S if fds or writing else 0.0
        signals = self._signals
        while True:
            start = time.monotonic()
            due = max(ticker.due, quiet)
            timeout = max(0.0, min(due - start, deadline - self.now()))
            reading = [self._done, *fds, *signals.fds]
            readable, writable, _ = select.select(reading, writing, [], timeout)
            signals.check()
            suspended_s = time.monotonic() - start - timeout
            if suspended_s > SUSPENDED_S:
                signals.suspended_s += suspended_s
            if writable or any(fd in readable for fd in fds):
                return False
            ending = self._done in readable or self._child.poll() is not None
            # The pipe closes when the process ends; the exit status follows at once.
            if ending and _ends_within(deadline - self.now(), self._child):
                return False
            if self.now() >= deadline:
                self._child.send_signal(signal.SIGABRT)
                _ends_within(TRACEBACK_S, self._child)
                return True
            now = time.monotonic()
            if now >= due:
                ticker.tick(now)

    def await_stop(self) -> None:
        """Wait until the child has stopped or ended after a SIGSTOP to ``tree``."""
        with contextlib.suppress(ChildProcessError):  # it has ended, and was waited for
            _, status = os.waitpid(self.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                self._child.returncode = os.waitstatus_to_exitcode(status)

    def close(self, *, timed_out: bool = False) -> ProcessExit:
        """Kill the child and its descendants, wait for the child, and return how it ended."""
        self.tree.kill()
        self._child.wait()
        self._close_pipes()
        wall = self.now() - self.started
        kills = _oom_kills() - self._kills_before
        kills += process_memory_limit.release_memory_limit(self.pid)
        suspended_s = self._signals.suspended_s - self._suspended_before_s
        return ProcessExit(self._child.returncode, timed_out, kills, wall, suspended_s)

    def _close_pipes(self) -> None:
        os.close(self._done)
        os.close(self._lifeline_writer)


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    on_tick: Callable[[int], None] = lambda pid: None,
    pass_fds: Sequence[int] = (),
) -> ProcessExit:
    """Run ``command`` to its end, as a :class:`ChildProcess`, which is killed after ``timeout_s``.

    ``on_tick`` is called about once a second with the process id. Raises ``Interrupted`` after a
    signal, when the child and its descendants have been killed, and ``OSError`` if the log can't be
    written or the command can't be started.
    """
    with InterruptSignals() as signals:
        child = ChildProcess(command, signals, environment=environment, log=log, pass_fds=pass_fds)
        timed_out = False
        try:
            ticker = Ticker(lambda: on_tick(child.pid))
            timed_out = child.wait_or_abort(child.started + timeout_s, ticker)
        finally:
            ending = child.close(timed_out=timed_out)
        await_signal_of_job([ending], signals)
    signals.check()  # a signal may arrive after the last check
    return ending


def await_signal_of_job(endings: Sequence[ProcessExit], signals: InterruptSignals) -> None:
    """If SIGINT or SIGTERM ended a child, wait briefly until this process receives it, too.

    A signal to a whole job may reach the child first.
    """
    if any(-ending.code in STOP_SIGNALS for ending in endings):
        select.select(signals.fds, [], [], SIGNAL_S)


def _ends_within(seconds: float, child: subprocess.Popen[bytes]) -> bool:
    """Wait until the child ends or the seconds have passed, and return whether it ended.

    ``Popen.wait`` with a timeout sleeps until an absolute time. If a simulated clock (libfaketime)
    is set back, this sleep fails with EINVAL, but the timeout of ``select`` still works.
    """
    pause, deadline = MIN_POLL_S, time.monotonic() + seconds
    while child.poll() is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        select.select([], [], [], min(pause, left))
        pause = min(2 * pause, MAX_POLL_S)
    return True


def _oom_kills() -> int:
    try:
        return linux.oom_kills()
    except (OSError, LookupError, ValueError):
        return 0  # not Linux, or the kernel does not report it
