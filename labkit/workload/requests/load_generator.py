"""The load generator: sends clients' requests to an engine and time-stamps every token.

A request is sent as soon as three conditions hold: it is due, the answer to its session's previous
request has arrived, and fewer requests are in flight than ``concurrency``. In a closed loop every
request is due from the start.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from labkit.engine.engine_protocol import (
    NO_TOKEN,
    InferenceEngine,
    InvalidLogitsError,
    Remote,
    StaleLaunchError,
    StreamEvent,
    TokenEvent,
)
from labkit.engine.request import Request
from labkit.workload.requests.memory_timeline import PERIOD_S, MemoryTimeline
from labkit.workload.requests.serving_metrics import ServedRequest
from labkit.workload.workload_protocols import InvalidOutput, StaleOutput

Clock = Callable[[], float]
Wait = Callable[[float], None]
MIN_WAIT_S = 1e-6  # a shorter wait might not advance the clock
MAX_WAIT_S = 0.02  # a longer wait would keep the other arms from their turns


@dataclass(frozen=True, slots=True)
class DueRequest:
    """A request to send now: its index, when it was due, and when its client sends it (seconds).

    A request is sent when it is due, or when another ends and makes room. In a closed loop both
    times are None.
    """

    index: int
    due: float | None
    sent: float | None


@dataclass
class ClientPool:
    """The clients that send requests as they come due. All times are seconds from the start.

    ``sessions``: each request's session, or None. ``due``: the earliest time to send each
    request; None: a closed loop. ``concurrency``: the maximum number of requests in flight; None:
    no limit. ``stagger_s``: seconds between the starts of two clients.
    """

    sessions: Sequence[str | None]
    due: Sequence[float] | None = None
    concurrency: int | None = None
    stagger_s: float = 0.0

    def __post_init__(self) -> None:
        self._in_flight = 0
        self._full_until = 0.0
        self._next_turns: dict[str, deque[int]] = {}  # by session
        self._ready: list[tuple[float, int]] = []
        for index, session in enumerate(self.sessions):
            if session is not None and session in self._next_turns:
                self._next_turns[session].append(index)
                continue
            if session is not None:
                self._next_turns[session] = deque()
            self._ready.append((0.0 if self.due is None else self.due[index], index))
        heapq.heapify(self._ready)

    def next(self, elapsed: float) -> DueRequest | None:
        """Remove and return a request that can be sent now, or None if there is none."""
        if self.next_send() > elapsed:
            return None
        due, index = heapq.heappop(self._ready)
        self._in_flight += 1
        if self.due is None:
            return DueRequest(index, None, None)
        return DueRequest(index, due, max(due, self._full_until))

    def next_send(self) -> float:
        """Return the earliest time at which the next request can be sent.

        It is infinite if the request must wait until another one ends, because all clients are
        busy, or for the answer to its session's previous request.
        """
        busy = self._in_flight
        if not self._ready or (self.concurrency is not None and busy >= self.concurrency):
            return math.inf
        return max(self._ready[0][0], self.stagger_s * busy)

    def finished(self, index: int, elapsed: float) -> None:
        """Note that a request in flight has ended, so its session's next request may be sent."""
        if self._in_flight == self.concurrency:
            self._full_until = elapsed
        self._in_flight -= 1
        session = self.sessions[index]
        if session is not None and self._next_turns[session]:
            following = self._next_turns[session].popleft()
            due = 0.0 if self.due is None else max(self.due[following], elapsed)
            heapq.heappush(self._ready, (due, following))


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One engine step: its start and end (seconds), and the requests that received tokens."""

    start: float
    end: float
    receivers: tuple[str, ...]


@dataclass(eq=False)
class LoadGenerator:
    """Sends requests when they are due, one engine step at a time.

    A token's time is the end of the step that produced it, which is the earliest moment at which
    a client could have it. With a server it is the time of receipt. In an open loop a request
    counts as submitted when its client sends it, even if the engine is in the middle of a step
    and accepts it later, because the engine causes this wait. A delay that the load generator
    itself adds is recorded as ``late``.

    ``engine`` must receive no other requests during the run. ``requests`` are in the order of the
    ``clients``. ``clock`` returns seconds and may stop between steps; ``wait`` sleeps for a number
    of seconds. ``heartbeat`` is called with the progress when requests have finished. ``timeline``
    samples the engine's memory between steps.
    """

    engine: InferenceEngine
    requests: Sequence[Request]
    _: KW_ONLY
    clients: ClientPool
    clock: Clock
    heartbeat: Callable[[str], None]
    timeline: MemoryTimeline
    wait: Wait = time.sleep

    def __post_init__(self) -> None:
        self.steps: list[TimedStep] = []
        self.cpu_s = 0.0  # CPU time of the load generator
        self._remote = self.engine if isinstance(self.engine, Remote) else None
        if self._remote is not None:
            self._remote.use_clock(self.clock)
        self._total = f"{len(self.requests)} request{'s' * (len(self.requests) != 1)}"
        self._sent: dict[int, ServedRequest] = {}
        self._live: dict[str, int] = {}
        self._start: float | None = None
        self._idle_since = 0.0  # end of the latest step or wait

    @property
    def done(self) -> bool:
        return len(self._sent) == len(self.requests) and not self._live

    @property
    def entries(self) -> list[ServedRequest]:
        """The requests sent so far with their tokens and times, in the order of ``requests``."""
        return [self._sent[index] for index in sorted(self._sent)]

    def step_seconds(self) -> NDArray[np.float64]:
        """Return the duration of each step in seconds, [steps].

        A step's duration starts at the end of the previous step or, if the generator waited in
        between, at the end of that wait.
        """
        return np.array([step.end - step.start for step in self.steps])

    def entries_without(self, stalled_s: NDArray[np.float64]) -> list[ServedRequest]:
        """Return ``entries`` as timed by a clock that stops during stalls.

        ``stalled_s``: seconds that each step lost to a stall, [steps].
        """
        ends = np.array([step.end for step in self.steps])
        stalled_before = np.concatenate([[0.0], np.cumsum(stalled_s)])

        latest = np.append(ends - stalled_s, np.inf)  # stalls are assumed to end their steps

        def moved(time: float) -> float:
            step = np.searchsorted(ends, time, side="right")
            return float(min(time, latest[step]) - stalled_before[step])

        return [
            replace(
                entry,
                submitted=moved(entry.submitted),
                chunk_times=list(map(moved, entry.chunk_times)),
                admitted=None if entry.admitted is None else moved(entry.admitted),
                due=None if entry.due is None else moved(entry.due),
                ended=None if entry.ended is None else moved(entry.ended),
            )
            for entry in self.entries
        ]

    def run(self) -> None:
        while not self.done:
            self.step()

    def step(self, until: float = math.inf) -> bool:
        """Send the requests that are due and run one engine step; wait if the engine is idle.

        ``until``: the time on the clock at which to stop waiting for a server. Returns whether the
        engine ran. Raises ``InvalidOutput`` if a request was lost, an event belongs to no live
        request, or logits are not finite. Raises ``StaleOutput`` if an attention output carries the
        stamp of another kernel launch.
        """
        cpu = time.thread_time()
        self._send()
        if not self.engine.has_work():
            self._wait_until_send()
            self.cpu_s += time.thread_time() - cpu
            return False
        self.cpu_s += time.thread_time() - cpu
        if self._remote is not None:
            self._remote.wait(min(self._until_send(), max(0.0, until - self.clock())))
        start = self.clock()
        events = self._run_engine()
        cpu, now = time.thread_time(), self.clock()
        receivers = tuple(event.request_id for event in events)
        self.steps.append(TimedStep(self._idle_since, now, receivers))
        self._idle_since = now
        finished = self._deliver(events, now)
        self.timeline.stepped(start, now)
        if finished:
            done = len(self._sent) - len(self._live)
            self.heartbeat(f"{done} of {self._total}")
        self.cpu_s += time.thread_time() - cpu
        return True

    def _until_send(self) -> float:
        assert self._start is not None
        elapsed = self.clock() - self._start
        return min(PERIOD_S, max(0.0, self.clients.next_send() - elapsed))

    def _run_engine(self) -> Sequence[TokenEvent]:
        try:
            return self.engine.step()
        except StaleLaunchError as error:
            raise StaleOutput(str(error)) from error
        except InvalidLogitsError as error:
            raise InvalidOutput(str(error)) from error

    def _send(self) -> None:
        if self._start is None:
            self._start = self._idle_since = self.clock()
        while (due := self.clients.next(self.clock() - self._start)) is not None:
            request, now = self.requests[due.index], self.clock()
            entry = ServedRequest(request.request_id, len(request.prompt_token_ids), submitted=now)
            if due.due is not None and due.sent is not None:
                entry.due = self._start + due.due
                entry.submitted = self._start + due.sent
                free = self.steps[-1].end if self.steps and not self._remote else self._start
                entry.late = max(0.0, now - max(entry.submitted, free))
            self._live[entry.request_id] = due.index
            self._sent[due.index] = entry
            self.engine.submit(request)
            self.timeline.submitted(entry)

    def _wait_until_send(self) -> None:
        """Wait until the next request can be sent, at most ``MAX_WAIT_S``."""
        next_send = self.clients.next_send()
        if self._live or next_send == math.inf:
            lost = ", ".join(sorted(self._live))
            raise InvalidOutput(f"the engine has no work left, but requests {lost} are unfinished")
        assert self._start is not None
        remaining = next_send - (self.clock() - self._start)
        self.wait(min(MAX_WAIT_S, max(MIN_WAIT_S, remaining)))
        self._idle_since = self.clock()

    def _deliver(self, events: Sequence[TokenEvent], now: float) -> int:
        """Add one step's events to their requests; return the number of requests that ended."""
        finished = 0
        chunks: set[tuple[str, float]] = set()
        for event in events:
            index = self._live.get(event.request_id)
            if index is None:
                raise InvalidOutput(f"an event names request {event.request_id}, which is not live")
            entry = self._sent[index]
            at = event.received if isinstance(event, StreamEvent) else now
            if event.finish_reason in ("error", "abort"):
                entry.error = event.error or event.finish_reason
            elif _add_event(entry, event) and (event.request_id, at) not in chunks:
                chunks.add((event.request_id, at))
                entry.chunk_times.append(at)
            if event.finish_reason is not None:
                entry.finish, entry.ended = event.finish_reason, at
                del self._live[event.request_id]
                self.clients.finished(index, at - (self._start or 0.0))
                finished += 1
        return finished


def _add_event(entry: ServedRequest, event: TokenEvent) -> bool:
    """Add an event to its request; return whether the event carries output."""
    if isinstance(event, StreamEvent):
        if event.finish_reason is not None:
            entry.counted, entry.text = event.counted, event.whole
            entry.first_chunk, entry.untimed_tokens = event.first_chunk, event.untimed_tokens
            return False
        if event.token == NO_TOKEN:
            return bool(event.text)
    if event.margin is not None and not math.isfinite(event.margin):
        where = f"request {event.request_id}, token {len(entry.tokens)}"
        raise InvalidOutput(f"{where}: the logits are not finite")
    entry.tokens.append(event.token)
    entry.margins.append(event.margin)
    return True
