"""The clock of one arm, which runs only during its turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ArmClock:
    """A clock that counts the seconds of one arm's turns. Any thread may read it.

    Parameters
    ----------
    base
        The clock of the process; returns seconds.
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
        """Let the clock run for one turn.

        Raises
        ------
        RuntimeError
            The clock is already running.
        """
        spent, since = self._turns
        if since is not None:
            raise RuntimeError("a turn began before the previous turn ended")
        self._turns = spent, self._base()
        try:
            yield
        finally:
            self._turns = self(), None
