"""Run a server that cannot outlive the process that started it (a run).

``SupervisedServer`` starts ``python -m labkit.machine.processes.server_supervisor``, a process
between the run and the server.

The supervisor is in a process group of its own, so a signal to the run's group does not kill it.
Its standard input is a pipe whose other end only the run holds. When the pipe closes, however the
run has ended, the supervisor kills the server and all its descendants. On Linux the supervisor
adopts descendants that lost their parent, and the kernel kills the server if the supervisor itself
is killed. The server's output goes to the run's log, line by line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from labkit.machine.processes.process_tree import signal_name

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP_COMMAND = b"stop\n"
STOP_TIMEOUT_S = 5.0  # from SIGTERM to SIGKILL
MAX_KILL_ROUNDS = 50  # descendants may start further processes before they are killed
MAX_LINE_BYTES = 4096  # longer lines of the server's log are split
LOG_PREFIX = b"server: "


class SupervisorError(RuntimeError):
    """The server's command cannot be run. The message is one line."""


class SupervisedServer(contextlib.AbstractContextManager["SupervisedServer"]):
    """A running server, which is killed when this process ends.

    ``pid``: the server's process id. ``command``: the server's program and arguments. The server
    inherits this process's environment. Raises ``SupervisorError`` if the command cannot be run.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        report_read, report_write = os.pipe()
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpgrp()), str(report_write), *command],
            stdin=subprocess.PIPE,
            process_group=0,
            pass_fds=(report_write,),
        )
        os.close(report_write)
        self._reports = os.fdopen(report_read, "rb")
        self._exit_description: str | None = None
        started = json.loads(self._reports.readline() or b'{"error": "the supervisor ended"}')
        if "error" in started:
            self._finish()
            raise SupervisorError(str(started["error"]))
        self.pid = int(started["pid"])

    def ended(self) -> str | None:
        """Return how the server ended and its last log line as a phrase, or None while it runs.

        The supervisor needs a moment to report the end, so this looks at the server itself.
        """
        if self._exit_description is None and (
            self._supervisor.poll() is not None or not _is_alive(self.pid)
        ):
            self._finish()
        return self._exit_description

    def stop(self) -> None:
        """Stop the server (SIGTERM, then SIGKILL) and wait until all its descendants have ended.

        Further calls do nothing.
        """
        if self._exit_description is not None:
            return
        with contextlib.suppress(BrokenPipeError):
            assert self._supervisor.stdin is not None
            self._supervisor.stdin.write(STOP_COMMAND)
            self._supervisor.stdin.flush()
        self._finish()

    def _finish(self) -> None:
        report = self._reports.read()
        self._reports.close()
        self._supervisor.wait()
        assert self._supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.stdin.close()
        self._exit_description = (
            json.loads(report)["ended"] if report else "the supervisor was killed"
        )

    def __exit__(self, *_: object) -> None:
        self.stop()


def main(argv: Sequence[str]) -> int:
    """Run the server ``argv[2:]`` in process group ``argv[0]`` until it ends or must be stopped.

    The start and the end are reported as JSON lines to file descriptor ``argv[1]``.
    """
    group, report, command = int(argv[0]), os.fdopen(int(argv[1]), "wb", buffering=0), argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child_ended = _child_wakeup_fd()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe ends the supervisor
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_server_preexec(group),
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _send_report(report, error=f"{command[0]}: {reason}")
        return 1
    _send_report(report, pid=server.pid)
    log = _ServerLog()
    stop_requested = _forward_log(server, child_ended, log)
    if stop_requested and server.poll() is None:
        _terminate(server, log)
    description = _describe_exit(server.poll(), log.last_line)
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        _send_report(report, ended=description)
    return 0


def _server_preexec(group: int) -> Any:
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # the run has ended, and the pipe will close at once
            os.setpgid(0, group)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return prepare


def _child_wakeup_fd() -> int:
    """Return a file descriptor that becomes readable when a child process ends."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer)
    return reader


def _forward_log(server: subprocess.Popen[bytes], child_ended: int, log: _ServerLog) -> bool:
    """Forward the log until the server or its owner ends, or the owner requests a stop: True."""
    assert server.stdout is not None
    owner, output = sys.stdin.fileno(), server.stdout.fileno()
    watched = [owner, child_ended, output]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if output in readable and not log.forward(output):
            watched.remove(output)
        if owner in readable:
            return os.read(owner, len(STOP_COMMAND)) == STOP_COMMAND
        if child_ended in readable:
            os.read(child_ended, 512)
            if server.poll() is not None:
                log.forward_rest(output)
                return False


def _terminate(server: subprocess.Popen[bytes], log: _ServerLog) -> None:
    assert server.stdout is not None
    server.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        readable, _, _ = select.select([server.stdout], [], [], 0.02)
        if readable and not log.forward(server.stdout.fileno()):
            time.sleep(0.02)
    log.forward_rest(server.stdout.fileno())


def _descendants() -> Iterator[int]:
    """Yield the ids of this process's live descendants, to be killed, until none is left."""
    for _ in range(MAX_KILL_ROUNDS):
        children = psutil.Process().children(recursive=True)
        alive = [child for child in children if _is_alive(child.pid)]
        if not alive:
            return
        yield from (child.pid for child in alive)
        psutil.wait_procs(alive, timeout=0.1)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class _ServerLog:
    """Forwards the server's output to standard output, line by line, and keeps the last line."""

    def __init__(self) -> None:
        self.last_line = ""
        self._incomplete_line = b""

    def forward(self, descriptor: int) -> bool:
        """Read once and forward the complete lines; return False at the end of the output."""
        data = os.read(descriptor, 65536)
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        if len(self._incomplete_line) > MAX_LINE_BYTES or not data:
            lines.append(self._incomplete_line)
            self._incomplete_line = b""
        self._write([line for line in lines if line.strip()])
        return bool(data)

    def forward_rest(self, descriptor: int) -> None:
        """Forward all output that is already in the pipe, without waiting for more."""
        while select.select([descriptor], [], [], 0)[0] and self.forward(descriptor):
            pass
        self._write([self._incomplete_line] if self._incomplete_line.strip() else [])

    def _write(self, lines: Sequence[bytes]) -> None:
        if lines:
            self.last_line = lines[-1].decode(errors="replace").strip()[:500]
            with contextlib.suppress(OSError):  # a full disk must not stop the server
                os.write(1, b"".join(LOG_PREFIX + line + b"\n" for line in lines))


def _send_report(report: Any, **fields: Any) -> None:
    report.write(json.dumps(fields).encode() + b"\n")


def _describe_exit(status: int | None, last_line: str) -> str:
    ending = "was stopped" if status is None else f"ended with exit status {status}"
    if status is not None and status < 0:
        ending = f"was ended by {signal_name(-status)}"
    return f"{ending}; its last line: {last_line}" if last_line else f"{ending}; it wrote nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
