"""The only thread that calls the engine.

Other threads queue commands for it (submit, abort, stop). It passes them the result of each step.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labkit.engine.engine_protocol import (
    EngineError,
    InferenceEngine,
    Observable,
    SelfChecking,
    TokenEvent,
)
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams

Command = Callable[[InferenceEngine], None]
# Idle seconds after which the engine is checked, once: late enough to delay no next request of a
# client that has just got its answer.
IDLE_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The result of one step of the engine.

    ``started`` and ``ended`` are times on the thread's clock (seconds). ``running`` contains the
    ids of the requests that run after this step, unlike those that wait or were preempted (where
    the engine is not ``Observable``: of those with a token in this step). ``counters`` are the
    engine's counters after the step. They are None if no request is live, because the engine then
    waits for a step in flight before it returns them. An ``EngineStep`` without events that has
    them follows at once. ``kv_usage`` is the share of the KV memory that is reserved
    after the step, 0 to 1; None if the engine does not report it or has no limit. If commands, such
    as aborts, leave the engine without work, an ``EngineStep`` reports only the usage after them.
    """

    started: float
    ended: float
    events: list[TokenEvent]
    running: set[str]
    counters: Mapping[str, float] | None
    kv_usage: float | None


class EngineThread:
    """Runs engine steps while the engine has work, and queued commands between the steps.

    Kernels use as many threads of the pool as in the thread that creates this object. After
    ``start``, only this thread may call the warmed-up ``engine``, which it closes when it is
    stopped. It calls ``on_step`` after each step, and once more with the counters of the last step.
    It also calls ``on_step`` after commands that leave the engine without work. When it ends, it
    calls ``on_end`` with the exception that ended it or None. ``clock`` returns seconds.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        on_step: Callable[[EngineStep], None],
        on_end: Callable[[BaseException | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from labkit.cpu.runtime.thread_pool import copy_num_threads

        self._copy_num_threads = copy_num_threads()
        self._engine = engine
        self._on_step = on_step
        self._on_end = on_end
        self._clock = clock
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._observable = engine if isinstance(engine, Observable) else None
        self._busy_since: float | None = None
        self._unchecked = False  # whether the engine has worked since it was last checked
        self._live: set[str] = set()  # ids of requests submitted but not ended

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. Its tokens, or the engine's refusal, are passed to ``on_step``."""

        def submit(engine: InferenceEngine) -> None:
            self._live.add(request.request_id)
            engine.submit(request)

        self._commands.put(submit)

    def abort(self, request_id: str) -> None:
        """Queue the abort of a request. Its events of earlier steps may still arrive."""

        def abort(engine: InferenceEngine) -> None:
            self._live.discard(request_id)
            engine.abort(request_id)

        self._commands.put(abort)

    def clear_cache(self, on_cleared: Callable[[], object]) -> None:
        """Queue a command: empty the prefix cache, then call ``on_cleared``, in this thread."""

        def clear(engine: InferenceEngine) -> None:
            engine.clear_cache()
            on_cleared()

        self._commands.put(clear)

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop the thread after the current step and wait until it ends, at most ``timeout_s``."""
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds since the current commands and step started; 0 while the thread is idle."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def _run(self) -> None:
        ended_by: BaseException | None = None
        try:
            self._copy_num_threads()
            while self._run_commands():
                if self._engine.has_work():
                    self._step()
                else:
                    self._report_usage()
            self._engine.close()
        except BaseException as error:
            traceback.print_exc()
            ended_by = error
        finally:
            self._busy_since = None
            self._on_end(ended_by)

    def _step(self) -> None:
        engine, started = self._engine, self._clock()
        self._unchecked = isinstance(engine, SelfChecking)
        events = engine.step()
        observable = self._observable
        self._live.difference_update(e.request_id for e in events if e.finish_reason)
        running = self._live.intersection(event.request_id for event in events)
        if observable is not None:
            running = set(filter(observable.is_running, self._live))
        is_idle = not engine.has_work()
        counters = None if is_idle else engine.counters()
        step = EngineStep(started, self._clock(), events, running, counters, self._kv_usage())
        self._on_step(step)
        if is_idle:
            self._on_step(replace(step, events=[], counters=engine.counters()))

    def _report_usage(self) -> None:
        """Report the KV usage after commands, because no step follows them that would."""
        now = self._clock()
        self._on_step(EngineStep(now, now, [], set(), None, self._kv_usage()))

    def _kv_usage(self) -> float | None:
        if self._observable is None:
            return None
        kv = self._observable.kv_bytes()
        return kv.reserved / kv.total if kv.total else None

    def _run_commands(self) -> bool:
        """Run queued commands, waiting if the engine is idle; return False to end the thread."""
        wait = not self._engine.has_work()
        self._busy_since = None if wait else self._clock()
        while True:
            try:
                command = self._commands.get(
                    block=wait, timeout=IDLE_CHECK_S if self._unchecked else None
                )
            except queue.Empty:
                if not wait:
                    return True
                self._check()
                continue
            self._busy_since = self._clock()
            if command is None:
                return False
            command(self._engine)
            wait = False

    def _check(self) -> None:
        """Check the idle engine: a block that leaked or is cached twice ends the server."""
        self._unchecked = False
        if isinstance(self._engine, SelfChecking):
            self._engine.check()


def warm_up(engine: InferenceEngine, num_requests: int, vocab_size: int) -> None:
    """Compile kernels and touch memory by generating tokens.

    A prompt of one token has kernels of its own. It runs alone after a longer one has, then
    ``num_requests`` requests run together. The engine's cache and counters are reset afterwards.
    Raises ``EngineError`` or ``RuntimeError`` if the engine cannot generate.
    """
    for count, length in ((1, 8), (1, 1), (num_requests, 8)):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for number in range(count):
            prompt = tuple((number * 7 + at) % vocab_size for at in range(length))
            engine.submit(Request(f"warm-up-{count}-{length}-{number}", prompt, params))
        events: list[Any] = []
        while engine.has_work():
            events += engine.step()
        errors = [event.error for event in events if event.finish_reason == "error"]
        if errors:
            raise EngineError(f"the engine cannot generate: {errors[0]}")
    engine.clear_cache()
    engine.reset_counters()
