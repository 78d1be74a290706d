"""The request schedule, and the clients that send requests according to it.

A request is sent as soon as three conditions hold: it is due, the answer to its session's previous
request has arrived, and fewer requests are in flight than ``concurrency``. In a closed loop every
request is due from the start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestSchedule:
    """Sessions, due times and concurrency, in the order of the requests.

    ``sessions``: each request's session, or None. ``due``: the earliest time to send each
    request, in seconds from the start; None: a closed loop. ``concurrency``: the maximum number of
    requests in flight; None: no limit. ``stagger_s``: seconds between the starts of two clients.
    """

    sessions: Sequence[str | None]
    due: Sequence[float] | None = None
    concurrency: int | None = None
    stagger_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DueRequest:
    """A request to send now: its index, when it was due, and when its client sends it (seconds).

    A request is sent when it is due, or when another ends and makes room. In a closed loop both
    times are None.
    """

    index: int
    due: float | None
    sent: float | None


class ClientPool:
    """The clients of a schedule, which send requests as they come due.

    All times are seconds from the start.
    """

    def __init__(self, schedule: RequestSchedule) -> None:
        self._schedule = schedule
        self._in_flight = 0
        self._full_until = 0.0
        self._next_turns: dict[str, list[int]] = {}  # by session, in reverse order
        self._ready: list[tuple[float, int]] = []
        for index, session in enumerate(schedule.sessions):
            if session is not None and session in self._next_turns:
                self._next_turns[session].append(index)
                continue
            if session is not None:
                self._next_turns[session] = []
            self._ready.append((self._due(index), index))
        for turns in self._next_turns.values():
            turns.reverse()
        heapq.heapify(self._ready)

    def _due(self, index: int) -> float:
        return 0.0 if self._schedule.due is None else self._schedule.due[index]

    def next(self, elapsed: float) -> DueRequest | None:
        """Remove and return a request that can be sent now, or None if there is none."""
        if self.next_send() > elapsed:
            return None
        due, index = heapq.heappop(self._ready)
        self._in_flight += 1
        if self._schedule.due is None:
            return DueRequest(index, None, None)
        return DueRequest(index, due, max(due, self._full_until))

    def next_send(self) -> float:
        """Return the earliest time at which the next request can be sent.

        It is infinite if the request must wait until another one ends, because all clients are
        busy, or for the answer to its session's previous request.
        """
        limit, busy = self._schedule.concurrency, self._in_flight
        if not self._ready or (limit is not None and busy >= limit):
            return math.inf
        return max(self._ready[0][0], self._schedule.stagger_s * busy)

    def finished(self, index: int, elapsed: float) -> None:
        """Note that a request in flight has ended, so its session's next request may be sent."""
        if self._in_flight == self._schedule.concurrency:
            self._full_until = elapsed
        self._in_flight -= 1
        session = self._schedule.sessions[index]
        if session is not None and self._next_turns[session]:
            following = self._next_turns[session].pop()
            due = 0.0 if self._schedule.due is None else max(self._due(following), elapsed)
            heapq.heappush(self._ready, (due, following))
