"""Freed memory, given back to the system while the server runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import psutil

from labkit.machine.facts import memory_capacity

LOOK_EVERY_S = 1.0
GROWTH_BYTES = 16 << 20  # since the last trim
REPEATS = 6  # trims after the first, each after twice the time


class HeapTrimmer:
    """Trims the heap of this process whenever the process has grown by ``GROWTH_BYTES``.

    A body of 4 MB or a grammar of 200 kB becomes many small objects. The heap keeps their memory,
    and the next such request takes more, because other objects have come between. What is still in
    use at a trim may be freed later, which does not show, so the trim is repeated a few times.
    ``is_busy``: whether requests are live, which may take memory.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._scheduled = False
        self._kept_bytes = 0
        self._looks = 0  # since the process grew
        self._trim_at = math.inf  # that look

    def look_later(self) -> None:
        """Look at the memory soon, and again until no request is live and all trims are done."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._scheduled = False
        resident = _resident_bytes()
        self._kept_bytes = min(self._kept_bytes, resident)
        self._looks += 1
        if resident - self._kept_bytes >= GROWTH_BYTES:
            self._looks = self._trim_at = 1
        if self._looks == self._trim_at:
            self._trim_at = 2 * self._looks if self._looks < 1 << REPEATS else math.inf
            self._kept_bytes = resident  # until the trim has ended
            asyncio.get_running_loop().run_in_executor(None, self._trim)
        if self._is_busy() or self._looks < self._trim_at < math.inf:
            self.look_later()

    def _trim(self) -> None:
        memory_capacity.trim_heap()
        self._kept_bytes = _resident_bytes()


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
