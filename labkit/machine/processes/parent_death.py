"""End a process when its parent dies, however the parent dies.

On Linux the kernel sends SIGKILL (``PR_SET_PDEATHSIG``). In addition, on every system, a thread
waits on the read end of a pipe whose write end only the parent holds. Without such a pipe, the
thread polls the parent's process id.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
POLL_S = 0.25


def watch_parent(parent: int, lifeline: int | None, *, started_by_main_thread: bool = True) -> None:
    """Kill this process, and the process group that it leads, when process ``parent`` has ended.

    ``lifeline``: the read end of a pipe whose write end only the parent holds. The watching thread
    blocks until the pipe closes, so it does not disturb a measurement. None: the thread polls the
    parent's process id every ``POLL_S`` seconds. ``started_by_main_thread``: whether the parent's
    main thread started this process. If not, ``PR_SET_PDEATHSIG`` is not used, because Linux sends
    its signal as soon as the thread that started this process ends.
    """
    if started_by_main_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not parent_is_alive(parent):  # the parent died before the call above
        kill_process_group()
    threading.Thread(target=_watch, args=(parent, lifeline), daemon=True).start()


def parent_is_alive(parent: int) -> bool:
    """Return whether ``parent`` is still this process's parent."""
    return os.getppid() == parent


def kill_process_group() -> None:
    """Kill this process and, if it leads a process group, the whole group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int, lifeline: int | None) -> None:
    if lifeline is not None:
        select.select([lifeline], [], [])
        kill_process_group()
    wait = threading.Event()
    while parent_is_alive(parent):
        wait.wait(POLL_S)
    kill_process_group()
