"""The only thread that calls the engine; other threads queue commands and receive events."""

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
    """The result of one step of the engine.

    ``began`` and ``ended`` are seconds on the thread's clock. ``admitted`` are the requests that
    started to run in the step. ``counters`` are the engine's after it, and ``kv_bytes`` is the KV
    memory that requests reserve then (None if the engine does not report it).
    """

    began: float
    ended: float
    events: list[TokenEvent]
    admitted: list[str]
    counters: Mapping[str, float]
    kv_bytes: int | None


class EngineThread:
    """Runs engine steps while there is work, and commands between them.

    Parameters
    ----------
    engine
        A warmed-up engine. From ``start`` on only this thread calls it; it also closes it.
    on_step
        Called in this thread after each step.
    on_end
        Called in this thread when it ends, with the exception that ended it or None.
    clock
        Returns seconds; tests pass a clock of their own.
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
        self._queued: set[str] = set()  # submitted, but not running yet

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; its tokens, or the engine's refusal, arrive as events."""

        def submit(engine: InferenceEngine) -> None:
            self._queued.add(request.request_id)
            engine.submit(request)

        self._inbox.put(submit)

    def abort(self, request_id: str) -> None:
        """End a request; events that are already queued still arrive."""

        def abort(engine: InferenceEngine) -> None:
            self._queued.discard(request_id)
            engine.abort(request_id)

        self._inbox.put(abort)

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread after the current step, and wait for it."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds since the current step or command started; 0 while idle."""
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
            with_events = {event.request_id for event in events}
            admitted = [
                request_id
                for request_id in self._queued
                if request_id in with_events or (watched and watched.is_running(request_id))
            ]
            self._queued.difference_update(admitted)
        kv_bytes = watched.kv_bytes().reserved if watched else None
        counters = engine.counters()
        self._on_step(EngineStep(began, self._clock(), events, admitted, counters, kv_bytes))

    def _run_commands(self) -> bool:
        """Run the queued commands; without other work, wait for one.

        Returns False when the thread has to end.
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
    """Generate a few tokens for 1 and for ``rows`` requests, to compile kernels and touch memory.

    Raises
    ------
    EngineError, RuntimeError
        The engine cannot generate.
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
