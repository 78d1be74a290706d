"""Drive an engine in a closed loop: so many requests in flight, every token stamped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labkit.engine.base import InvalidLogitsError, StaleLaunchError
from labkit.workload.measurement import InvalidOutput, StaleOutput
from labkit.workload.metrics import Served
from labkit.workload.timeline import Timeline

if TYPE_CHECKING:
    from labkit.engine.base import InferenceEngine, TokenEvent
    from labkit.engine.request import Request

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Clients:
    """``number`` clients, each with a request in flight; one joins every ``stagger`` seconds."""

    number: int
    stagger: float = 0.0

    def present(self, elapsed: float) -> int:
        """Return how many there are after so many seconds, at least one."""
        if elapsed >= self.stagger * (self.number - 1):
            return self.number
        return 1 + int(elapsed / self.stagger)


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: when it ended (seconds), and the requests that got its tokens."""

    end: float
    receivers: tuple[str, ...]


class Drive:
    """Keeps a request per client in flight, an engine step at a time.

    A token's time is the moment at which the step that produced it returned, the
    earliest at which a client could have it.

    Parameters
    ----------
    engine
        Nobody else submits to it meanwhile.
    requests
        In the order of submission.
    clients
        How many are in flight.
    clock
        Seconds; it may stand still between two steps.
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
        clients: Clients,
        clock: Clock,
        beat: Callable[[str], None],
        timeline: Timeline,
    ) -> None:
        self.requests = tuple(requests)
        self.served: list[Served] = []
        self.timeline = timeline
        self.steps: list[Step] = []
        self._engine = engine
        self._waiting = iter(self.requests)
        self._clients = clients
        self._clock = clock
        self._beat = beat
        self._live: dict[str, Served] = {}
        self._began: float | None = None

    @property
    def done(self) -> bool:
        """Whether every request is finished; ``served`` is then in the order of ``requests``."""
        return len(self.served) == len(self.requests) and not self._live

    def step_seconds(self) -> NDArray[np.float64]:
        """Return how long each step took, from the end of the one before: seconds, [steps]."""
        began = [] if self._began is None else [self._began]
        return np.diff(np.array([*began, *(step.end for step in self.steps)]))

    def served_without(self, lost: NDArray[np.float64]) -> list[Served]:
        """Return what was served, by a clock that stood still while steps lost time.

        ``lost``: seconds of each step, [steps].
        """
        ends = np.array([step.end for step in self.steps])
        gone = np.concatenate([[0.0], np.cumsum(lost)])

        def moved(time: float) -> float:
            return float(time - gone[np.searchsorted(ends, time, side="right")])

        return [
            replace(
                entry,
                submitted=moved(entry.submitted),
                chunk_times=[moved(time) for time in entry.chunk_times],
                admitted=None if entry.admitted is None else moved(entry.admitted),
            )
            for entry in self.served
        ]

    def run(self) -> None:
        """Step until all is done; see ``step``."""
        while not self.done:
            self.step()

    def step(self) -> None:
        """Submit what is due and run one step of the engine.

        Raises
        ------
        InvalidOutput
            A request failed or was lost, an event belongs to no live request, or the
            logits are not numbers.
        StaleOutput
            An attention launch left another launch's stamp.
        """
        try:
            self._submit()
            if not self._engine.has_work():
                lost = sorted(self._live)
                raise InvalidOutput(f"the engine has no work left, but {lost} are unfinished")
            start = self._clock()
            events = self._engine.step()
        except StaleLaunchError as error:
            raise StaleOutput(str(error)) from error
        except InvalidLogitsError as error:
            raise InvalidOutput(str(error)) from error
        now = self._clock()
        self.steps.append(Step(now, tuple(event.request_id for event in events)))
        finished = self._deliver(events, now)
        self.timeline.stepped(start, now)
        if finished:
            done = len(self.served) - len(self._live)
            self._beat(f"{done} of {len(self.requests)} requests")

    def _submit(self) -> None:
        if self._began is None:
            self._began = self._clock()
        while (
            len(self._live) < self._clients.present(self._clock() - self._began)
            and (request := next(self._waiting, None)) is not None
        ):
            entry = Served(
                request.request_id, len(request.prompt_token_ids), submitted=self._clock()
            )
            self._live[entry.request_id] = entry
            self.served.append(entry)
            self._engine.submit(request)
            self.timeline.submitted(entry)

    def _deliver(self, events: Sequence[TokenEvent], now: float) -> int:
        """Hand one step's events to their requests; return how many requests finished."""
        finished = 0
        chunk: set[str] = set()
        for event in events:
            entry = self._live.get(event.request_id)
            if entry is None:
                raise InvalidOutput(f"an event for request {event.request_id}, which is not live")
            if event.finish_reason in ("error", "abort"):
                reason = event.error or event.finish_reason
                raise InvalidOutput(f"request {event.request_id} failed: {reason}")
            if event.margin is not None and not math.isfinite(event.margin):
                where = f"request {event.request_id}, token {len(entry.tokens)}"
                raise InvalidOutput(f"{where}: the logits are not finite")
            entry.tokens.append(event.token)
            entry.margins.append(event.margin)
            if event.request_id not in chunk:
                chunk.add(event.request_id)
                entry.chunk_times.append(now)
            if event.finish_reason is not None:
                entry.finish = event.finish_reason
                del self._live[event.request_id]
                finished += 1
        return finished
