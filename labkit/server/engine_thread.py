"""The one thread that touches the engine; everybody else leaves commands and gets events."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.engine.engine_protocol import EngineError, InferenceEngine, Observable, TokenEvent
from labkit.engine.request import Request, SamplingParams

Command = Callable[[InferenceEngine], None]


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What a step did.

    ``began`` and ``ended`` are seconds on the thread's clock; ``admitted`` are the requests
    that began to run in it, ``counters`` the engine's after it, and ``kv_bytes`` what
    requests hold then (None: the engine does not say).
    """

    began: float
    ended: float
    events: list[TokenEvent]
    admitted: list[str]
    counters: Mapping[str, float]
    kv_bytes: int | None


class EngineThread:
    """Runs steps while there is work, and commands between them.

    Parameters
    ----------
    engine
        Ready to serve; from ``start`` on only this thread calls it, and closes it.
    on_step
        Called in this thread with each step.
    on_end
        Called in this thread when it ends: with the exception that ended it, or None.
    clock
        Seconds; a parameter so that tests can know the answers.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        on_step: Callable[[EngineStep], None],
        on_end: Callable[[BaseException | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_end = on_end
        self._clock = clock
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watched = engine if isinstance(engine, Observable) else None
        self._busy_since: float | None = None
        self._queued: set[str] = set()  # submitted, and not seen running yet

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; what comes of it, a refusal too, comes as events."""

        def submit(engine: InferenceEngine) -> None:
            self._queued.add(request.request_id)
            engine.submit(request)

        self._inbox.put(submit)

    def abort(self, request_id: str) -> None:
        """End a request; events that are under way still come."""

        def abort(engine: InferenceEngine) -> None:
            self._queued.discard(request_id)
            engine.abort(request_id)

        self._inbox.put(abort)

    def stop(self, timeout_s: float | None = None) -> None:
        """End after the step that runs, and wait for that."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """For how long the step or command that runs now has been running (seconds)."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def _run(self) -> None:
        ended_by: BaseException | None = None
        try:
            while self._run_commands():
                if self._engine.has_work():
                    self._step()
            self._engine.close()
        except BaseException as error:
            traceback.print_exc()
            ended_by = error
        finally:
            self._busy_since = None
            self._on_end(ended_by)

    def _step(self) -> None:
        engine, began = self._engine, self._clock()
        events = engine.step()
        watched = self._watched
        admitted: list[str] = []
        if self._queued:
            told = {event.request_id for event in events}
            admitted = [
                request_id
                for request_id in self._queued
                if request_id in told or (watched and watched.is_running(request_id))
            ]
            self._queued.difference_update(admitted)
        kv_bytes = watched.kv_bytes().reserved if watched else None
        counters = engine.counters()
        self._on_step(EngineStep(began, self._clock(), events, admitted, counters, kv_bytes))

    def _run_commands(self) -> bool:
        """Carry out the commands that are there, waiting for one if there is nothing to do.

        False: it shall end.
        """
        wait = not self._engine.has_work()
        self._busy_since = None if wait else self._clock()
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            self._busy_since = self._clock()
            if command is None:
                return False
            command(self._engine)
            wait = False


def warm_up(engine: InferenceEngine, rows: int, vocab_size: int) -> None:
    """Generate a few tokens for one request and for ``rows``: kernels compile, memory is touched.

    Raises
    ------
    EngineError, RuntimeError
        The engine does not generate.
    """
    for count in dict.fromkeys((1, rows)):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for number in range(count):
            prompt = tuple((number * 7 + at) % vocab_size for at in range(8))
            engine.submit(Request(f"warm-up-{count}-{number}", prompt, params))
        events: list[Any] = []
        while engine.has_work():
            events += engine.step()
        errors = [event.error for event in events if event.finish_reason == "error"]
        if errors:
            raise EngineError(f"the engine does not generate: {errors[0]}")
    engine.clear_cache()
    engine.reset_counters()
