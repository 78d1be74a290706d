"""The one thread that touches the engine; everybody else leaves commands and gets events."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from labkit.engine.base import InferenceEngine, TokenEvent
from labkit.engine.request import Request

Command = Callable[[InferenceEngine], None]


class EngineThread:
    """Runs steps while there is work, and commands between them.

    Parameters
    ----------
    engine
        Ready to serve; from ``start`` on only this thread calls it, and closes it.
    on_events
        Called in this thread with the events of each step.
    on_end
        Called in this thread when it ends: with the exception that ended it, or None.
    clock
        Seconds; a parameter so that tests can know the answers.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        on_events: Callable[[list[TokenEvent]], None],
        on_end: Callable[[BaseException | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_end = on_end
        self._clock = clock
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._busy_since: float | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; what comes of it, a refusal too, comes as events."""
        self._inbox.put(lambda engine: engine.submit(request))

    def abort(self, request_id: str) -> None:
        """End a request; events that are under way still come."""
        self._inbox.put(lambda engine: engine.abort(request_id))

    def ask(self, command: Command) -> None:
        """Run ``command`` between two steps."""
        self._inbox.put(command)

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
            while self._obey():
                if self._engine.has_work():
                    events = self._engine.step()
                    if events:
                        self._on_events(events)
            self._engine.close()
        except BaseException as error:
            traceback.print_exc()
            ended_by = error
        finally:
            self._busy_since = None
            self._on_end(ended_by)

    def _obey(self) -> bool:
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
    from labkit.engine.base import EngineError
    from labkit.engine.request import SamplingParams

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
