"""The clock of one arm, which runs only during its turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ArmClock:
    """A clock that counts the seconds of one arm's turns.

    Parameters
    ----------
    base
        The clock of the process; returns seconds.
    """

    def __init__(self, base: Callable[[], float] = time.perf_counter) -> None:
        self._base = base
        self._spent = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """Return the seconds of all turns so far, including the current turn."""
        return self._spent if self._since is None else self._spent + self._base() - self._since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clock run for one turn.

        Raises
        ------
        RuntimeError
            The clock is already running.
        """
        if self._since is not None:
            raise RuntimeError("a turn began inside a turn")
        self._since = self._base()
        try:
            yield
        finally:
            self._spent, self._since = self(), None
