"""Requests that wait to be admitted, the first in line found without a look at the others.

A server may be asked for 100,000 requests at once, and every admission looks at the queue.
Both orders are binary heaps whose entries outlive a request that leaves from the middle (an
abort): such an entry is thrown away when it comes to the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from labkit.engine.request import RequestState

Place = tuple[int, int]


class WaitingQueue:
    """A queue by ``place`` (unique and fixed for a request's life, the smallest first)."""

    def __init__(self, place: Callable[[RequestState], Place]) -> None:
        self._place = place
        self._states: dict[int, RequestState] = {}  # by serial
        self._by_place: list[tuple[Place, int]] = []
        self._by_arrival: list[int] = []

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        """Yield every request that waits, in no particular order."""
        return iter(self._states.values())

    @property
    def first(self) -> RequestState | None:
        """The first in line; None: nobody waits."""
        queue = self._by_place
        while queue and queue[0][1] not in self._states:
            heappop(queue)
        return self._states[queue[0][1]] if queue else None

    def add(self, state: RequestState) -> None:
        """Let a request wait; one that was sent back takes the place that it had."""
        self._states[state.arrival_index] = state
        heappush(self._by_place, (self._place(state), state.arrival_index))
        heappush(self._by_arrival, state.arrival_index)

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        del self._states[state.arrival_index]
        if self._by_place[0][1] == state.arrival_index:
            heappop(self._by_place)

    def has_earlier_than(self, state: RequestState) -> bool:
        """Tell whether any request that waits arrived before ``state``."""
        arrivals = self._by_arrival
        while arrivals and arrivals[0] not in self._states:
            heappop(arrivals)
        return bool(arrivals) and arrivals[0] < state.arrival_index
