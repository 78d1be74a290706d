"""One child process: started in its own session, watched, and never left behind."""

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

TICK_S = 1.0
GRACE_S = 0.5  # for a Python traceback of a hanging worker (faulthandler on SIGABRT)
# With what a cluster stops a job, or warns it: every process of the job gets it.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class ProcessExit:
    """How a process ended. ``code``: its exit status, or minus the signal's number."""

    code: int
    timed_out: bool
    oom_kills: int
    wall_s: float

    @property
    def signal_name(self) -> str | None:
        """The signal that ended it, if one did."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel killed it for want of memory."""
        return self.code == -signal.SIGKILL and self.oom_kills > 0 and not self.timed_out


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    on_tick: Callable[[int], None] = lambda pid: None,
) -> ProcessExit:
    """Run ``command`` to its end; its output goes to ``log``.

    The command gets ``--parent PID --lifeline FD --spawned NS`` appended: whom to
    watch, a pipe that ends with this process, and the monotonic clock at the start.

    Parameters
    ----------
    timeout_s
        After so many seconds (monotonic clock) the whole process group is killed.
    on_tick
        Called about once a second with the process id.

    Raises
    ------
    Interrupted
        A signal came; the process group is gone by then.
    OSError
        The log can't be written or the command can't be started.
    """
    with InterruptSignals() as signals:
        ending = _run(command, environment, log, timeout_s, signals, on_tick)
        if -ending.code in STOPS:  # the worker may have had it first
            select.select(signals.fds, [], [], GRACE_S)
    signals.check()  # one that came at the very end is not lost
    return ending


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    signals: InterruptSignals,
    on_tick: Callable[[int], None],
) -> ProcessExit:
    lifeline, hold = os.pipe()
    done, held = os.pipe()
    kills, start = _oom_kills(), time.monotonic()
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
                pass_fds=(lifeline, held),
            )
        os.close(held)
        held = -1
        try:
            timed_out = _watch(child, done, start + timeout_s, signals, on_tick)
        finally:
            _kill_group(child)
    finally:
        for descriptor in (lifeline, hold, done, held):
            if descriptor >= 0:
                os.close(descriptor)
    wall = time.monotonic() - start
    own = process_memory_limit.release_memory_limit(child.pid)
    return ProcessExit(child.returncode, timed_out, _oom_kills() - kills + own, wall)


def _watch(
    child: subprocess.Popen[bytes],
    done: int,
    deadline: float,
    signals: InterruptSignals,
    on_tick: Callable[[int], None],
) -> bool:
    """Wait for the end; tell whether the deadline came first."""
    tick = time.monotonic() + TICK_S
    while True:
        wait = max(0.0, min(tick, deadline) - time.monotonic())
        readable, _, _ = select.select([done, *signals.fds], [], [], wait)
        signals.check()
        if done in readable or child.poll() is not None:
            # The pipe's end closes with the process; the exit status follows at once.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(0.0, deadline - time.monotonic()))
                return False
        now = time.monotonic()
        if now >= deadline:
            child.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=GRACE_S)
            return True
        if now >= tick:
            on_tick(child.pid)
            tick = max(tick + TICK_S, now)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the child's process group, and collect the child."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _oom_kills() -> int:
    try:
        return linux.oom_kills()
    except (OSError, LookupError, ValueError):
        return 0  # not Linux, or it does not tell


def last_lines(log: Path, count: int = 10) -> list[str]:
    """Return the last lines of a log that hold anything."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
