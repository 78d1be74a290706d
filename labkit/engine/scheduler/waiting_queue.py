"""The queue of requests that wait to be admitted.

A server may have 100,000 waiting requests, and every admission reads the queue, so both orders (by
key and by arrival) are binary heaps. If a request is removed from the middle (an abort), its
entries stay in the heaps until they reach the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from labkit.engine.request import QueueKey, RequestState


class WaitingQueue:
    """A queue in the order of ``key``, smallest first. A request's key is unique and constant."""

    def __init__(self, key: Callable[[RequestState], QueueKey]) -> None:
        self._key = key
        self._states: dict[int, RequestState] = {}  # by arrival index
        self._by_key: list[tuple[QueueKey, int]] = []
        self._by_arrival: list[int] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    @property
    def first(self) -> RequestState | None:
        """The request with the smallest key, or None if the queue is empty."""
        heap = self._by_key
        while heap and heap[0][1] not in self._states:
            heappop(heap)
        return self._states[heap[0][1]] if heap else None

    def add(self, state: RequestState) -> None:
        """Add a request. A preempted request gets its former position, because its key is fixed."""
        self._states[state.arrival_index] = state
        heappush(self._by_key, (self._key(state), state.arrival_index))
        heappush(self._by_arrival, state.arrival_index)

    def remove(self, state: RequestState) -> None:
        del self._states[state.arrival_index]
        if self._by_key[0][1] == state.arrival_index:
            heappop(self._by_key)

    def has_earlier_than(self, state: RequestState) -> bool:
        """Return whether a waiting request arrived before ``state``."""
        arrivals = self._by_arrival
        while arrivals and arrivals[0] not in self._states:
            heappop(arrivals)
        return bool(arrivals) and arrivals[0] < state.arrival_index
