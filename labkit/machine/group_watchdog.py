"""A watchdog that kills process groups when this process ends, however it ends.

A stopped process (SIGSTOP) cannot watch its parent itself. The watchdog is a process in a session
of its own that waits on the read end of a pipe, whose write end only this process holds. The file
imports only the standard library, because the watchdog runs it by its path.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import TracebackType


class GroupWatchdog:
    """Context manager: while it is open, the end of this process ends the watched groups."""

    def __init__(self) -> None:
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, group: int) -> None:
        """Watch a process group."""
        self._tell(f"+{group}")

    def release(self, group: int) -> None:
        """Stop watching a process group, which has ended."""
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(f"{line}\n".encode())
        self._watchdog.stdin.flush()

    def __enter__(self) -> GroupWatchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the watchdog. Groups that are still watched are killed."""
        self._watchdog.communicate()


def main() -> None:
    """Read ``+GROUP`` and ``-GROUP`` from standard input; at its end, kill the watched groups."""
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
