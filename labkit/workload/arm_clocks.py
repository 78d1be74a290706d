"""The clocks of arms that take turns: each counts the seconds of its own arm only.

Arms that share a process have an ``ArmClock`` each. If every arm has its own process, its clock is
a ``LiveClock``: what the process computes between two steps, in another thread or in a server that
it has started, takes time on this clock, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ArmClock:
    """A clock that counts the seconds of one arm's turns. Any thread may read it.

    ``base``: the clock of the process; returns seconds.
    """

    def __init__(self, base: Callable[[], float] = time.perf_counter) -> None:
        self._base = base
        # Seconds of the turns that are over, and the start of the current turn. One attribute, so
        # that another thread reads both at once.
        self._turns: tuple[float, float | None] = (0.0, None)

    def __call__(self) -> float:
        """Return the seconds of all turns so far, including the current turn."""
        spent, since = self._turns
        return spent if since is None else spent + self._base() - since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clock run for one turn. Raises ``RuntimeError`` if it is already running."""
        spent, since = self._turns
        if since is not None:
            raise RuntimeError("a turn began before the previous turn ended")
        self._turns = spent, self._base()
        try:
            yield
        finally:
            self._turns = self(), None


class LiveClock(ArmClock):
    """The clock of a process that is stopped between its turns; it runs unless that is the case.

    ``stopped_s``: returns the seconds for which the process has been stopped so far. ``base``: a
    clock that runs on while the process is stopped; returns seconds.
    """

    def __init__(
        self, stopped_s: Callable[[], float], base: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(base)
        self._stopped_s = stopped_s

    def __call__(self) -> float:
        """Return the seconds for which the process could run."""
        while True:
            stopped_s = self._stopped_s()
            now = self._base() - stopped_s
            if self._stopped_s() == stopped_s:  # else the process was stopped between two reads
                return now

    @contextmanager
    def running(self) -> Iterator[None]:
        """Do nothing, because the clock runs during the whole turn."""
        yield
