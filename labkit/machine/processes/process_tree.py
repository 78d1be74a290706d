"""A process with all its descendants: stop them, let them continue, or kill them.

Many servers start a session or a process group of their own, so a signal to a process group does
not reach all descendants. They are therefore also searched by parent process id. A descendant that
was found once remains in the tree, even if its parent ends and another process adopts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil

from labkit.machine.facts import linux

MAX_ROUNDS = 50  # descendants may start further processes before a signal reaches them


def signal_name(number: int) -> str:
    """Return a signal's name like ``SIGKILL``, or text like ``signal 35`` if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ProcessTree:
    """A process and its descendants. All methods ignore processes that have ended.

    ``pid``: the root of the tree. ``whole_group``: whether the process group that the root leads
    belongs to the tree. Its processes are stopped at the same moment.
    """

    def __init__(self, pid: int, *, whole_group: bool) -> None:
        self.pid = pid
        self._whole_group = whole_group
        self._root: list[psutil.Process] = []  # empty if the process has ended
        with contextlib.suppress(psutil.Error):
            self._root.append(psutil.Process(pid))
        self._descendants: dict[int, psutil.Process] = {}

    @property
    def pids(self) -> list[int]:
        """The ids of the root and of the descendants that were found so far."""
        return [self.pid, *self._descendants]

    def stop(self) -> list[int]:
        """Stop all processes (SIGSTOP), and return the ids of new descendants."""
        self.signal(signal.SIGSTOP)
        return self.stop_new()

    def stop_new(self) -> list[int]:
        """Stop descendants that were not known before, and return their ids.

        A process may start another one just before it stops, so the search is repeated until it
        finds no further process.
        """
        found: list[int] = []
        for _ in range(MAX_ROUNDS):
            new = self.search()
            if not new:
                break
            found += new
            for pid in new:
                _send(self._descendants[pid], signal.SIGSTOP)
        return found

    def resume(self) -> None:
        """Let all processes continue (SIGCONT)."""
        self.search()
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all processes (SIGKILL)."""
        self.stop()
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> float:
        """Send a signal to the root, to its group, and to all descendants found so far.

        Returns when the group had received it (``time.perf_counter``); the others follow in turn.
        """
        if self._whole_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        received = time.perf_counter()
        for process in [*self._root, *self._descendants.values()]:
            _send(process, number)
        return received

    def search(self) -> list[int]:
        """Find the descendants that exist now, and return the ids of the new ones."""
        alive = {pid: one for pid, one in self._descendants.items() if one.is_running()}
        roots = [one.pid for one in self._root if one.is_running()]
        new: list[int] = []
        for root in [*roots, *alive]:
            for pid in _descendants(root):
                if pid not in alive:
                    with contextlib.suppress(psutil.Error):
                        alive[pid] = psutil.Process(pid)
                        new.append(pid)
        self._descendants = alive
        return new


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended and its id has been given to another."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _descendants(pid: int) -> Iterator[int]:
    if sys.platform != "linux":
        with contextlib.suppress(psutil.Error):
            yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
        return
    for child in linux.children(pid):
        yield child
        yield from _descendants(child)
