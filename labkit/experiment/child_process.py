"""A child process: started in its own session, watched, and killed with its whole group."""

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

from labkit.experiment.interrupt_signals import InterruptSignals
from labkit.machine import linux, process_memory_limit
from labkit.machine.signal_names import signal_name

TICK_S = 1.0
TRACEBACK_S = 0.5  # for a hanging worker to print its traceback (faulthandler on SIGABRT)
MIN_POLL_S, MAX_POLL_S = 0.0005, 0.05  # between looks at a child that is about to end
# Signals by which a cluster stops or warns a job; every process of the job gets them.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class ProcessExit:
    """The end of a process. ``code`` is its exit status, or minus the signal's number."""

    code: int
    timed_out: bool
    oom_kills: int
    wall_s: float

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that ended the process, or None."""
        return None if self.code >= 0 else signal_name(-self.code)

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel killed the process because memory ran out."""
        return self.code == -signal.SIGKILL and self.oom_kills > 0 and not self.timed_out


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    on_tick: Callable[[int], None] = lambda pid: None,
) -> ProcessExit:
    """Run ``command`` to its end, with its output in ``log``.

    ``--parent PID --lifeline FD --spawned NS`` is appended to the command: the id of this process,
    a pipe that closes when this process ends, and the monotonic clock (ns) at the child's start.

    Parameters
    ----------
    timeout_s
        Seconds (monotonic clock) after which the whole process group is killed.
    on_tick
        Called about once a second with the process id.

    Raises
    ------
    Interrupted
        A signal was received; the process group has been killed.
    OSError
        The log can't be written or the command can't be started.
    """
    with InterruptSignals() as signals:
        ending = _run(command, environment, log, timeout_s, signals, on_tick)
        if -ending.code in STOP_SIGNALS:  # the worker may have got it first
            select.select(signals.fds, [], [], TRACEBACK_S)
    signals.check()  # a signal may arrive after the last check
    return ending


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    signals: InterruptSignals,
    on_tick: Callable[[int], None],
) -> ProcessExit:
    lifeline, lifeline_writer = os.pipe()
    done, done_writer = os.pipe()  # `done` becomes readable when the child ends
    kills_before, start = _oom_kills(), time.monotonic()
    try:
        with open(log, "wb") as output:
            arguments = ["--parent", os.getpid(), "--lifeline", lifeline]
            arguments += ["--spawned", time.monotonic_ns()]
            child = subprocess.Popen(
                [*command, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                pass_fds=(lifeline, done_writer),
            )
        os.close(done_writer)
        done_writer = -1
        try:
            timed_out = _watch(child, done, start + timeout_s, signals, on_tick)
        finally:
            _kill_group(child)
    finally:
        for descriptor in (lifeline, lifeline_writer, done, done_writer):
            if descriptor >= 0:
                os.close(descriptor)
    wall = time.monotonic() - start
    own_kills = process_memory_limit.release_memory_limit(child.pid)
    return ProcessExit(child.returncode, timed_out, _oom_kills() - kills_before + own_kills, wall)


def _watch(
    child: subprocess.Popen[bytes],
    done: int,
    deadline: float,
    signals: InterruptSignals,
    on_tick: Callable[[int], None],
) -> bool:
    """Wait until the child ends or the deadline passes; return whether it timed out."""
    tick = time.monotonic() + TICK_S
    while True:
        wait = max(0.0, min(tick, deadline) - time.monotonic())
        readable, _, _ = select.select([done, *signals.fds], [], [], wait)
        signals.check()
        ending = done in readable or child.poll() is not None
        # The pipe closes when the process ends; the exit status follows at once.
        if ending and _ends_before(deadline, child):
            return False
        now = time.monotonic()
        if now >= deadline:
            child.send_signal(signal.SIGABRT)
            _ends_before(now + TRACEBACK_S, child)
            return True
        if now >= tick:
            on_tick(child.pid)
            tick = max(tick + TICK_S, now)


def _ends_before(deadline: float, child: subprocess.Popen[bytes]) -> bool:
    """Wait until the child ends or the deadline (monotonic clock) passes; return whether it ended.

    ``Popen.wait`` with a timeout sleeps until absolute times. Under a simulated clock that is set
    back (libfaketime) such a sleep fails with EINVAL, and the timeout of ``select`` does not.
    """
    pause = MIN_POLL_S
    while child.poll() is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        select.select([], [], [], min(pause, left))
        pause = min(2 * pause, MAX_POLL_S)
    return True


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the rest of the child's process group, and wait for the child."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _oom_kills() -> int:
    try:
        return linux.oom_kills()
    except (OSError, LookupError, ValueError):
        return 0  # not Linux, or the kernel does not report it


def last_lines(log: Path, count: int = 10) -> list[str]:
    """Return the last lines of a log that are not blank."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
