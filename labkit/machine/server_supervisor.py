"""Keeps a server for exactly as long as its owner lives.

``python -m labkit.machine.server_supervisor`` is that process.

The keeper stands between a run and the server that it starts, in a process group of its own, so
that what kills the run's group does not kill it. Its standard input is a pipe whose other end only
the run holds: when that closes, however the run ended, the keeper kills the server and everything
that descends from it. On Linux descendants that lost their parent become the keeper's, and the
kernel kills the server where the keeper itself is killed. What the server writes goes to the run's
log, line by line.
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
from types import TracebackType
from typing import Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP_COMMAND = b"stop\n"
STOP_TIMEOUT_S = 5.0  # from the signal to stop until the kill
MAX_KILL_ROUNDS = 50  # looks for descendants, each after the ones before are killed
MAX_LINE_BYTES = 4096  # bytes of a line of the server's log
LOG_PREFIX = b"server: "


class SupervisorError(RuntimeError):
    """The server cannot be started, in one line."""


class SupervisedServer:
    """A server that the keeper keeps; the end of this process ends it too.

    Parameters
    ----------
    command
        What is started, word by word, in this process's environment.

    Raises
    ------
    KeeperError
        The command cannot be run.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = tuple(command)
        said, saying = os.pipe()
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpgrp()), str(saying), *command],
            stdin=subprocess.PIPE,
            process_group=0,
            pass_fds=(saying,),
        )
        os.close(saying)
        self._said = os.fdopen(said, "rb")
        self._last: str | None = None
        first = json.loads(self._said.readline() or b'{"error": "the keeper ended"}')
        if "error" in first:
            self._end()
            raise SupervisorError(str(first["error"]))
        self.pid = int(first["pid"])

    def ended(self) -> str | None:
        """Say how the server ended, with the last line that it wrote; None while it runs."""
        if self._last is None and self._keeper.poll() is not None:
            self._end()
        return self._last

    def stop(self) -> None:
        """Ask the server to end, kill what has not by then, and return when all of it is gone.

        Harmless to call again.
        """
        if self._last is not None:
            return
        with contextlib.suppress(BrokenPipeError):
            assert self._keeper.stdin is not None
            self._keeper.stdin.write(STOP_COMMAND)
            self._keeper.stdin.flush()
        self._end()

    def _end(self) -> None:
        if self._last is not None:
            return
        report = self._said.read()
        self._said.close()
        self._keeper.wait()
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._last = json.loads(report)["ended"] if report else "the keeper was killed"

    def __enter__(self) -> SupervisedServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def main(argv: Sequence[str]) -> int:
    """Keep ``argv[2:]`` in process group ``argv[0]``; report to descriptor ``argv[1]``."""
    group, report, command = int(argv[0]), os.fdopen(int(argv[1]), "wb", buffering=0), argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake = _child_wakeup_fd()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pipe alone says when it is over
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
    asked = _forward_log(server, wake, log)
    if asked and server.poll() is None:
        _terminate(server, log)
    ended = _describe_exit(server.poll(), log.last)
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        _send_report(report, ended=ended)
    return 0


def _server_preexec(group: int) -> Any:
    """Return what the server's process does before it becomes the server."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # the run is gone: the pipe will say so at once
            os.setpgid(0, group)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return prepare


def _child_wakeup_fd() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer)
    return reader


def _forward_log(server: subprocess.Popen[bytes], wake: int, log: _ServerLog) -> bool:
    """Pass the log on until the server or its owner ends; tell whether a stop was asked for."""
    assert server.stdout is not None
    owner, output = sys.stdin.fileno(), server.stdout.fileno()
    reading = [owner, wake, output]
    while True:
        readable, _, _ = select.select(reading, [], [])
        if output in readable and not log.take(output):
            reading.remove(output)
        if owner in readable:
            return os.read(owner, len(STOP_COMMAND)) == STOP_COMMAND
        if wake in readable:
            os.read(wake, 512)
            if server.poll() is not None:
                log.take_rest(output)
                return False


def _terminate(server: subprocess.Popen[bytes], log: _ServerLog) -> None:
    assert server.stdout is not None
    server.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        readable, _, _ = select.select([server.stdout], [], [], 0.02)
        if readable and not log.take(server.stdout.fileno()):
            time.sleep(0.02)
    log.take_rest(server.stdout.fileno())


def _descendants() -> Iterator[int]:
    """Yield whatever descends from this process, until there is nothing any more."""
    for _ in range(MAX_KILL_ROUNDS):
        found = psutil.Process().children(recursive=True)
        alive = [child for child in found if _is_running(child)]
        if not alive:
            return
        yield from (child.pid for child in alive)
        psutil.wait_procs(alive, timeout=0.1)


def _is_running(process: Any) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class _ServerLog:
    """Passes what the server writes on, line by line, and keeps the last one."""

    def __init__(self) -> None:
        self.last = ""
        self._rest = b""

    def take(self, descriptor: int) -> bool:
        """Read what there is; tell whether more may come."""
        block = os.read(descriptor, 65536)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES or not block:
            lines.append(self._rest)
            self._rest = b""
        self._write([line for line in lines if line.strip()])
        return bool(block)

    def take_rest(self, descriptor: int) -> None:
        """Read what is in the pipe already; what a descendant may still write is not waited for."""
        while select.select([descriptor], [], [], 0)[0] and self.take(descriptor):
            pass
        self._write([self._rest] if self._rest.strip() else [])

    def _write(self, lines: Sequence[bytes]) -> None:
        if lines:
            self.last = lines[-1].decode(errors="replace").strip()[:500]
            with contextlib.suppress(OSError):  # a full disk must not end the server
                os.write(1, b"".join(LOG_PREFIX + line + b"\n" for line in lines))


def _send_report(report: Any, **what: Any) -> None:
    report.write(json.dumps(what).encode() + b"\n")


def _describe_exit(status: int | None, last: str) -> str:
    ending = "was stopped" if status is None else f"ended with exit status {status}"
    if status is not None and status < 0:
        ending = f"was ended by {signal.Signals(-status).name}"
    return f"{ending}; its last line: {last}" if last else f"{ending}; it wrote nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
