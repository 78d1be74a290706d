"""Drive an engine with requests as clients send them, every token stamped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labkit.engine.engine_protocol import (
    NO_TOKEN,
    InvalidLogitsError,
    Remote,
    StaleLaunchError,
    StreamEvent,
)
from labkit.workload.measurement import InvalidOutput, StaleOutput
from labkit.workload.memory_timeline import PERIOD_S, MemoryTimeline
from labkit.workload.request_schedule import ClientPool, RequestSchedule
from labkit.workload.serving_metrics import ServedRequest

if TYPE_CHECKING:
    from labkit.engine.engine_protocol import InferenceEngine, TokenEvent
    from labkit.engine.request import Request

Clock = Callable[[], float]
Wait = Callable[[float], None]
LEAST_S = 1e-6  # a shorter wait might not move the clock
NAP_S = 0.02  # the longest wait at a time, so that an arm that waits gives others their turn


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One engine step: when it began and ended (s), and the requests that got its tokens."""

    began: float
    end: float
    receivers: tuple[str, ...]


class LoadGenerator:
    """Sends what clients have to send, an engine step at a time.

    A token's time is the moment at which the step that produced it returned, the
    earliest at which a client could have it; of a server, at which it was received. A request
    that arrives by itself counts as submitted when a client sends it, also where the engine is
    in the middle of a step then and takes it after: that wait is the engine's. What the sender
    adds is its lateness.

    Parameters
    ----------
    engine
        Nobody else submits to it meanwhile.
    requests
        In the order of the plan.
    plan
        When which of them is sent.
    clock, wait
        Seconds, and what lets some pass; the clock may stand still between two steps.
    beat
        Is told when requests have finished.
    timeline
        Looks at the engine between steps.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        requests: Sequence[Request],
        *,
        plan: RequestSchedule,
        clock: Clock,
        beat: Callable[[str], None],
        timeline: MemoryTimeline,
        wait: Wait = time.sleep,
    ) -> None:
        self.requests = tuple(requests)
        self.timeline = timeline
        self.steps: list[TimedStep] = []
        self.cpu_s = 0.0  # of the sender
        self._engine = engine
        self._remote = engine if isinstance(engine, Remote) else None
        self._clients = ClientPool(plan)
        self._clock, self._wait = clock, wait
        self._beat = beat
        self._sent: dict[int, ServedRequest] = {}
        self._live: dict[str, int] = {}
        self._began: float | None = None
        self._since = 0.0  # when the next step begins at the earliest: after a step or a wait

    @property
    def done(self) -> bool:
        """Whether every request has ended, well or not."""
        return len(self._sent) == len(self.requests) and not self._live

    @property
    def entries(self) -> list[ServedRequest]:
        """What has become of the requests that were sent, in the order of ``requests``."""
        return [self._sent[index] for index in sorted(self._sent)]

    def step_seconds(self) -> NDArray[np.float64]:
        """Return how long each step took, from the end of the one before or of a wait: [steps]."""
        return np.array([step.end - step.began for step in self.steps])

    def entries_without(self, lost: NDArray[np.float64]) -> list[ServedRequest]:
        """Return ``entries`` by a clock that stood still while steps lost time.

        ``lost``: seconds of each step, [steps].
        """
        ends = np.array([step.end for step in self.steps])
        gone = np.concatenate([[0.0], np.cumsum(lost)])

        latest = np.append(ends - lost, np.inf)  # within a step, what is lost comes last

        def moved(time: float) -> float:
            step = np.searchsorted(ends, time, side="right")
            return float(min(time, latest[step]) - gone[step])

        return [
            replace(
                entry,
                submitted=moved(entry.submitted),
                chunk_times=[moved(time) for time in entry.chunk_times],
                admitted=None if entry.admitted is None else moved(entry.admitted),
                due=None if entry.due is None else moved(entry.due),
            )
            for entry in self.entries
        ]

    def run(self) -> None:
        """Step until all is done; see ``step``."""
        while not self.done:
            self.step()

    def step(self) -> bool:
        """Send what is due and run one step of the engine, or wait where it has nothing to do.

        Returns
        -------
        bool
            Whether the engine ran.

        Raises
        ------
        InvalidOutput
            A request was lost, an event belongs to no live request, or the logits are not
            numbers.
        StaleOutput
            An attention launch left another launch's stamp.
        """
        cpu = time.thread_time()
        self._send()
        if not self._engine.has_work():
            self._await()
            self.cpu_s += time.thread_time() - cpu
            return False
        self.cpu_s += time.thread_time() - cpu
        if self._remote is not None:
            self._remote.wait(self._until_due())
        start = self._clock()
        events = self._run_engine()
        cpu, now = time.thread_time(), self._clock()
        self.steps.append(TimedStep(self._since, now, tuple(event.request_id for event in events)))
        self._since = now
        finished = self._deliver(events, now)
        self.timeline.stepped(start, now)
        if finished:
            done = len(self._sent) - len(self._live)
            self._beat(f"{done} of {len(self.requests)} requests")
        self.cpu_s += time.thread_time() - cpu
        return True

    def _until_due(self) -> float:
        """Return for how long nothing has to be sent, as far as is known."""
        assert self._began is not None
        due, elapsed = self._clients.next_due(), self._clock() - self._began
        if due is None or not self._clients.has_room(elapsed):
            return PERIOD_S
        return min(PERIOD_S, max(0.0, due - elapsed))

    def _run_engine(self) -> Sequence[TokenEvent]:
        try:
            return self._engine.step()
        except StaleLaunchError as error:
            raise StaleOutput(str(error)) from error
        except InvalidLogitsError as error:
            raise InvalidOutput(str(error)) from error

    def _send(self) -> None:
        if self._began is None:
            self._began = self._since = self._clock()
        while (sending := self._clients.next(self._clock() - self._began)) is not None:
            request, now = self.requests[sending.index], self._clock()
            entry = ServedRequest(request.request_id, len(request.prompt_token_ids), submitted=now)
            if sending.due is not None and sending.sent is not None:
                entry.due = self._began + sending.due
                entry.submitted = self._began + sending.sent
                free = self.steps[-1].end if self.steps and not self._remote else self._began
                entry.late = max(0.0, now - max(entry.submitted, free))
            self._live[entry.request_id] = sending.index
            self._sent[sending.index] = entry
            self._engine.submit(request)
            self.timeline.submitted(entry)

    def _await(self) -> None:
        """Let time pass until the next request is due, or a part of it."""
        due = self._clients.next_due()
        if self._live or due is None:
            lost = sorted(self._live)
            raise InvalidOutput(f"the engine has no work left, but {lost} are unfinished")
        assert self._began is not None
        self._wait(min(NAP_S, max(LEAST_S, due - (self._clock() - self._began))))
        self._since = self._clock()

    def _deliver(self, events: Sequence[TokenEvent], now: float) -> int:
        """Hand one step's events to their requests; return how many requests ended."""
        finished = 0
        chunks: set[tuple[str, float]] = set()
        behind = time.perf_counter() - self._clock()
        for event in events:
            index = self._live.get(event.request_id)
            if index is None:
                raise InvalidOutput(f"an event for request {event.request_id}, which is not live")
            entry = self._sent[index]
            at = event.received - behind if isinstance(event, StreamEvent) else now
            if event.finish_reason in ("error", "abort"):
                entry.error = event.error or event.finish_reason
            elif _take(entry, event) and (event.request_id, at) not in chunks:
                chunks.add((event.request_id, at))
                entry.chunk_times.append(at)
            if event.finish_reason is not None:
                entry.finish = event.finish_reason
                del self._live[event.request_id]
                self._clients.answered(index, now - (self._began or 0.0))
                finished += 1
        return finished


def _take(entry: ServedRequest, event: TokenEvent) -> bool:
    """Note what an event brings; tell whether it brings any of the output."""
    if isinstance(event, StreamEvent):
        if event.finish_reason is not None:
            entry.counted, entry.text = event.counted, event.whole
            return False
        if event.token == NO_TOKEN:
            return bool(event.text)
    if event.margin is not None and not math.isfinite(event.margin):
        where = f"request {event.request_id}, token {len(entry.tokens)}"
        raise InvalidOutput(f"{where}: the logits are not finite")
    entry.tokens.append(event.token)
    entry.margins.append(event.margin)
    return True
