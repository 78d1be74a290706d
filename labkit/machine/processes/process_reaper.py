"""Cleanup of orphans: kill or resume process trees when this process ends, however it ends.

A stopped process (SIGSTOP) cannot watch its parent. So a cleanup process, in a session of its own,
waits on the read end of a pipe whose write end only this process holds. When the pipe closes, the
cleanup process kills or resumes each tree, as this process has requested.
"""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, suppress

from labkit.machine.processes.process_tree import ProcessTree


class ProcessReaper(AbstractContextManager["ProcessReaper"]):
    """Context manager that kills or resumes the watched process trees if this process ends."""

    def __init__(self) -> None:
        self._cleanup = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, start_new_session=True
        )

    def kill_at_exit(self, pid: int) -> None:
        """Kill a process, its group and its descendants when this process ends."""
        self._tell(f"kill {pid}")

    def resume_at_exit(self, pid: int) -> None:
        """Resume a process and its descendants when this process ends."""
        self._tell(f"resume {pid}")

    def release(self, pid: int) -> None:
        """Stop watching a process, because it has ended or no longer needs the cleanup."""
        with suppress(BrokenPipeError):  # the error that ends the set must not be hidden
            self._tell(f"release {pid}")

    def _tell(self, line: str) -> None:
        assert self._cleanup.stdin is not None
        try:
            self._cleanup.stdin.write(f"{line}\n".encode())
            self._cleanup.stdin.flush()
        except BrokenPipeError:
            killed = "the process that would end the arms was killed"
            raise BrokenPipeError(errno.EPIPE, killed) from None

    def __exit__(self, *_: object) -> None:
        """End the cleanup process. It kills or resumes the trees that are still watched."""
        self._cleanup.communicate()


def main() -> None:
    """Read lines ``kill PID``, ``resume PID`` and ``release PID``; act when standard input ends."""
    # Only the pipe ends this process, not a signal to the whole job.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    to_kill: dict[int, ProcessTree] = {}
    to_resume: dict[int, ProcessTree] = {}
    for line in sys.stdin:
        verb, pid = line.split()[0], int(line.split()[1])
        if verb == "kill":
            to_kill[pid] = ProcessTree(pid, whole_group=True)
        elif verb == "resume":
            to_resume[pid] = ProcessTree(pid, whole_group=False)
        else:
            to_kill.pop(pid, None)
            to_resume.pop(pid, None)
    for tree in to_resume.values():
        tree.resume()
    for tree in to_kill.values():
        tree.kill()


if __name__ == "__main__":
    main()
