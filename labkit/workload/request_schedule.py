"""Clients: which request is sent next, and when.

A request is sent when it is due, its session's answer before it has come, and no more are in
flight than may be. In a closed loop all requests are due from the beginning, and the number of
clients alone holds them back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestSchedule:
    """What clients have to send, in the order of the requests.

    ``sessions``: of which session each request is (None: of none). ``due``: when each may be
    sent at the earliest, in seconds from the beginning; None: a closed loop. ``number``: in
    flight at most; None: any. ``stagger``: seconds from one client's beginning to the next's.
    """

    sessions: Sequence[str | None]
    due: Sequence[float] | None = None
    number: int | None = None
    stagger: float = 0.0

    def present(self, elapsed: float) -> float:
        """Return how many clients there are after so many seconds, at least one."""
        if self.number is None:
            return math.inf
        if elapsed >= self.stagger * (self.number - 1):
            return self.number
        return 1 + int(elapsed / self.stagger)


@dataclass(frozen=True, slots=True)
class DueRequest:
    """A request to be sent now: its index; when it was due and when a client sends it (s).

    It is sent when it is due, or when another has made room. In a closed loop both are None:
    it is sent now.
    """

    index: int
    due: float | None
    sent: float | None


class ClientPool:
    """Hands out the requests of a plan; times are seconds from the beginning."""

    def __init__(self, plan: RequestSchedule) -> None:
        self._plan = plan
        self._in_flight = 0
        self._full_until = 0.0
        self._later: dict[str, list[int]] = {}  # turns that wait for an answer, the next one last
        self._ready: list[tuple[float, int]] = []
        for index, session in enumerate(plan.sessions):
            if session is not None and session in self._later:
                self._later[session].append(index)
                continue
            if session is not None:
                self._later[session] = []
            self._ready.append((self._due(index), index))
        for turns in self._later.values():
            turns.reverse()
        heapq.heapify(self._ready)

    def _due(self, index: int) -> float:
        return 0.0 if self._plan.due is None else self._plan.due[index]

    def next(self, elapsed: float) -> DueRequest | None:
        """Take the request that is sent at this time, if there is one."""
        if not self._ready or not self.has_room(elapsed):
            return None
        due, index = self._ready[0]
        if due > elapsed:
            return None
        heapq.heappop(self._ready)
        self._in_flight += 1
        if self._plan.due is None:
            return DueRequest(index, None, None)
        return DueRequest(index, due, max(due, self._full_until))

    def has_room(self, elapsed: float) -> bool:
        """Tell whether one more may be in flight at this time."""
        return self._in_flight < self._plan.present(elapsed)

    def next_due(self) -> float | None:
        """Return when the next request is due; None where all that are left wait for an answer."""
        return self._ready[0][0] if self._ready else None

    def answered(self, index: int, elapsed: float) -> None:
        """Note that a request has ended: there is room, and its session's next turn is due."""
        if self._in_flight == self._plan.number:
            self._full_until = elapsed
        self._in_flight -= 1
        session = self._plan.sessions[index]
        if session is not None and self._later[session]:
            following = self._later[session].pop()
            due = 0.0 if self._plan.due is None else max(self._plan.due[following], elapsed)
            heapq.heappush(self._ready, (due, following))
