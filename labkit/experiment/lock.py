"""One timing cell per host: an advisory lock that says who holds it and since when."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.experiment import StudyError


def lock_path(device: str = "cpu") -> Path:
    """Return the lock file of a device of this host, in the temporary folder."""
    return Path(tempfile.gettempdir()) / f"labkit-{device}.lock"


@contextmanager
def timing_lock(
    holder: str,
    *,
    device: str = "cpu",
    on_wait: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
    poll_s: float = 0.5,
) -> Iterator[None]:
    """Hold the host's timing lock; wait for it while another cell is timing.

    The lock is the kernel's (flock): it ends with the process that holds it, however
    that ends, and is not inherited by workers.

    Parameters
    ----------
    holder
        Who is asking, for the message that others see.
    on_wait
        Called with one line when the lock is taken, and again every minute.
    check
        Called at every poll (``poll_s`` seconds); may raise to give up.

    Raises
    ------
    StudyError
        The lock file can't be opened.
    """
    path = lock_path(device)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StudyError(f"{path}: the timing lock can't be opened: {error.strerror}") from None
    try:
        _acquire(descriptor, on_wait, check, poll_s)
        facts = {"holder": holder, "pid": os.getpid(), "since": time.time()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(
    descriptor: int, on_wait: Callable[[str], None], check: Callable[[], None], poll_s: float
) -> None:
    told = -float("inf")
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            check()
            if time.monotonic() - told >= 60:
                told = time.monotonic()
                on_wait(f"waiting: {describe(descriptor)}")
            time.sleep(poll_s)


def describe(descriptor: int) -> str:
    """Say in one line who holds the lock, since when and for how long."""
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
        since = float(facts["since"])
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
        held = max(0, round(time.time() - since))
        return (
            f"{facts['holder']} (pid {facts['pid']}) is timing on this host "
            f"since {clock}, for {held} s"
        )
    except (ValueError, KeyError, TypeError):
        return "another cell is timing on this host"
