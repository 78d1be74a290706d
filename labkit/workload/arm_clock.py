"""A clock of an arm's own, which runs only in its turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ArmClock:
    """Seconds that an arm has had so far.

    Parameters
    ----------
    base
        The clock that never stands still; seconds.
    """

    def __init__(self, base: Callable[[], float] = time.perf_counter) -> None:
        self._base = base
        self._spent = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """Return the seconds spent in all turns, the one that lasts included."""
        return self._spent if self._since is None else self._spent + self._base() - self._since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clock run for one turn.

        Raises
        ------
        RuntimeError
            It runs already.
        """
        if self._since is not None:
            raise RuntimeError("a turn began inside a turn")
        self._since = self._base()
        try:
            yield
        finally:
            self._spent, self._since = self(), None
