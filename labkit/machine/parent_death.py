"""A worker ends with its parent, however the parent ends.

On Linux the kernel sends SIGKILL (``prctl``); everywhere a thread waits on the read end
of a pipe whose write end only the parent holds, or polls the parent's process id where
there is no such pipe.
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


def watch_parent(parent: int, lifeline: int | None, *, lasting: bool = True) -> None:
    """Watch process ``parent`` from now on; kill this process group when it is gone.

    Parameters
    ----------
    parent
        Its process id.
    lifeline
        Descriptor of the pipe; with it the thread sleeps until the end, so that watching costs
        a measurement nothing.
    lasting
        Whether the thread that started this process lives as long as ``parent``: Linux sends
        the signal when that thread ends.
    """
    if lasting and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not parent_is_alive(parent):  # it died before the call above
        kill_process_group()
    threading.Thread(target=_watch, args=(parent, lifeline), daemon=True).start()


def parent_is_alive(parent: int) -> bool:
    """Tell whether ``parent`` is still this process's parent."""
    return os.getppid() == parent


def kill_process_group() -> None:
    """Kill this process and, if it leads its own group, all of the group."""
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
