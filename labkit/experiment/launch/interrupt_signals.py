"""SIGINT and SIGTERM as a flag that ``select`` can watch, so that no step is interrupted midway.

SIGTSTP (ctrl-Z) may be deferred, too, and the seconds in which this process was suspended are
counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from labkit.experiment import Interrupted

WATCHED = (signal.SIGINT, signal.SIGTERM)


class InterruptSignals:
    """Context manager in which a signal sets a flag and makes the descriptors ``fds`` readable.

    Python installs signal handlers only in the main thread. In another thread the context does
    nothing. ``defer_suspension``: whether SIGTSTP waits until ``suspend_if_due`` is called.
    ``suspended_s``: the seconds in which this process was suspended, as far as they are known.
    """

    def __init__(self, *, defer_suspension: bool = False) -> None:
        self.received: int | None = None
        self.suspended_s = 0.0
        self.fds: list[int] = []
        self._writer: int | None = None
        self._defer_suspension = defer_suspension
        self._suspension_due = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> InterruptSignals:
        if threading.current_thread() is threading.main_thread():
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self.fds = [reader]
            self._previous = {number: signal.signal(number, self._receive) for number in WATCHED}
            if self._defer_suspension:
                self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._defer)
        return self

    def __exit__(self, *_: object) -> None:
        self.suspend_if_due()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for descriptor in (*self.fds, self._writer):
            if descriptor is not None:
                os.close(descriptor)
        self._previous, self.fds, self._writer = {}, [], None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self._writer is not None:
            with contextlib.suppress(BlockingIOError):  # the pipe is full, so it is readable
                os.write(self._writer, b"!")

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._suspension_due = True

    def suspend_if_due(self) -> None:
        """If SIGTSTP was received, let it take effect now, and count the seconds until SIGCONT."""
        if not self._suspension_due:
            return
        self._suspension_due, start = False, time.monotonic()
        signal.signal(signal.SIGTSTP, self._previous[signal.SIGTSTP])
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._defer)
        self.suspended_s += time.monotonic() - start

    def check(self) -> None:
        if self.received is not None:
            raise Interrupted(signal.Signals(self.received).name)
