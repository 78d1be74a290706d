"""labkit's own engine, over any KV layout: paged, contiguous, padded, naive."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from labkit.engine.engine_protocol import (
    NO_TOKEN,
    Counters,
    EngineError,
    KVBytes,
    TokenEvent,
    check_request,
)
from labkit.engine.kv_cache_interface import KVCacheManager
from labkit.engine.request import Request
from labkit.engine.scheduler.scheduler import Scheduler
from labkit.engine.step_loop import StepLoop
from labkit.engine.step_trace import StepTrace

if TYPE_CHECKING:
    from labkit.engine.runner.step_clocks import StepClocks

# Counters that are returned even if they are 0.
ALWAYS_COUNTED = (
    "steps.total",
    "steps.mixed",
    "tokens.padded",
    "step_ms",
    "device_ms",
    "preemptions",
    "tokens.recomputed",
    "requests.submitted",
    "requests.finished",
    "requests.aborted",
)


class LLMEngine:
    """An ``InferenceEngine`` around a ``StepLoop``.

    The loop runs the steps. The engine refuses requests that can never be served, ends all requests
    after a failed step, and gathers the counters of its parts.

    ``draft_counters`` are those of the draft model's forwards, returned with ``draft.`` before the
    name. Requests with a token id of ``vocab_size`` or more, or longer than ``max_context`` tokens
    (None: unknown), are refused. ``notes`` and ``load_counters`` are decisions made at load, for
    the records: the forward and its reason, the dtype, the budget's policy, the bytes of weights.
    ``name`` is the preset's. The counter ``engine.<name>`` is the number of steps.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: KVCacheManager,
        loop: StepLoop,
        counters: Counters,
        vocab_size: int,
        max_context: int | None,
        notes: Mapping[str, str | float | None],
        load_counters: Mapping[str, float],
        name: str,
        draft_counters: Counters | None = None,
    ) -> None:
        self.name = name
        self.notes = dict(notes)
        self._load_counters = dict(load_counters)
        self._scheduler = scheduler
        self._cache = cache
        self._loop = loop
        self._counters = counters
        self._draft_counters = draft_counters or Counters()
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._refused: list[TokenEvent] = []
        self._is_superfluous = False  # a step in flight has only rows of ended requests

    def submit(self, request: Request) -> None:
        request_id = request.request_id
        if self._scheduler.is_live(request_id):
            raise EngineError(f"request {request_id}: this id is already in use")
        try:
            check_request(request, self._vocab_size, self._max_context)
            _check_params(request, self._vocab_size)
            self._scheduler.add(request)
        except EngineError as error:
            self.refuse(request_id, f"request {request_id}: {error}")

    def refuse(self, request_id: str, reason: str) -> None:
        """Make the next ``step`` end a request, which was not submitted, with an error event."""
        self._counters.add("requests.refused")
        self._refused.append(TokenEvent(request_id, NO_TOKEN, "error", error=reason))

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)
        self._is_superfluous |= not self._scheduler.has_work()
        self._refused = [event for event in self._refused if event.request_id != request_id]

    def has_work(self) -> bool:
        return bool(self._refused) or self._scheduler.has_work()

    def step(self) -> list[TokenEvent]:
        """Run one batch. Return error events of refused requests, then the batch's token events.

        An exception aborts every request, because the state of the step in flight is unknown. The
        refused requests get their events from the next call.
        """
        self._finish_superfluous_step()
        with self._timed_step():
            events = self._loop.step()
        self._is_superfluous = not self._scheduler.has_work()
        refused, self._refused = self._refused, []
        return refused + events

    @contextlib.contextmanager
    def _timed_step(self) -> Iterator[None]:
        """Add the time of the context to ``step_ms``. After an exception, end every request."""
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self._scheduler.close()
            self._loop.abandon()
            self._cache.forget_failed_step()
            raise
        finally:
            self._counters.add("step_ms", (time.perf_counter() - start) * 1e3)

    def _finish_superfluous_step(self) -> None:
        """Wait for a step in flight of which nobody waits for a result, and drop the results."""
        if self._is_superfluous:
            self._is_superfluous = False
            with self._timed_step():
                self._loop.discard()

    def drain(self) -> None:
        with self._timed_step():  # an exception aborts every request, as in ``step``
            self._loop.drain()

    def is_running(self, request_id: str) -> bool:
        return self._scheduler.is_running(request_id)

    def kv_bytes(self) -> KVBytes:
        # A token in a shared block is counted for each request that shares it, up to the reserved.
        used = self._cache.used_bytes(self._scheduler.num_computed_tokens)
        return KVBytes(self._cache.reserved_bytes, used, self._cache.total_bytes)

    def computed_tokens(self) -> float:
        return self._counters.value("tokens.computed")

    def max_request_tokens(self) -> int:
        capacity = self._cache.capacity_tokens + 1  # the last token is never computed
        return capacity if self._max_context is None else min(capacity, self._max_context)

    def lingering_requests(self) -> Collection[str]:
        return self._cache.lingering_requests()

    def trace_steps(self, limit: int, clock: Callable[[], float]) -> StepTrace:
        trace = StepTrace(limit, clock, self._scheduler, self._cache)
        self._loop.trace(trace)
        return trace

    def time_steps(self, clock: Callable[[], float]) -> StepClocks:
        from labkit.engine.runner.step_clocks import StepClocks

        clocks = StepClocks(clock)
        self._loop.time_steps(clocks)
        return clocks

    def counters(self) -> dict[str, float]:
        """Return the counters of steps, tokens, blocks, prefixes, requests and time.

        ``device_ms`` is the time of the model's forwards. ``host_ms`` is the time of the steps
        minus the time in which the host waited for a forward, a draft model's included. If no
        request is live, the call waits for a step in flight, to count it. Otherwise, while a step
        is in flight, the counters of attention launches may lack the latest steps: they were summed
        at the first launch after the previous call.
        """
        self._finish_superfluous_step()
        values = dict.fromkeys(ALWAYS_COUNTED, 0.0)
        values |= self._loop.counters() | self._scheduler.counts.as_dict()
        draft = self._draft_counters.as_dict()
        device_ms = values["device_ms"] + draft.get("device_ms", 0.0)
        return values | {
            **{f"draft.{name}": value for name, value in draft.items()},
            f"engine.{self.name}": values["steps.total"],
            "host_ms": values["step_ms"] - values.get("pipeline.wait_ms", device_ms),
            **self._load_counters,
            **self._cache.counters(),
        }

    def reset_counters(self) -> None:
        self._finish_superfluous_step()
        self.drain()  # else a step in flight would count its launches while they are reset
        self._counters.reset()
        self._draft_counters.reset()
        self._cache.reset_counters()
        self._scheduler.counts.reset()

    def clear_cache(self) -> None:
        self._finish_superfluous_step()
        self._cache.clear()

    def close(self) -> None:
        self._scheduler.close()
        self._refused = []
        self._loop.close()

    def check(self) -> None:
        """Raise ``AssertionError`` unless requests and blocks agree."""
        self._scheduler.check()


def _check_params(request: Request, vocab_size: int) -> None:
    """Raise ``EngineError`` if a parameter names no token of the vocabulary, or needs texts."""
    params, rows = request.params, len(request.prompt_token_ids) - 1
    if max(params.logit_bias, default=0) >= vocab_size:
        raise EngineError(
            f"logit_bias names token {max(params.logit_bias)}; ids are 0 to {vocab_size - 1}"
        )
    ids = params.prompt_logprob_ids
    if ids is not None and (ids.ndim != 2 or len(ids) != rows):
        raise EngineError(
            f"prompt_logprob_ids has shape {list(ids.shape)}; it needs a row for each prompt token "
            f"but the first: [{rows}, m]"
        )
    if ids is not None and ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise EngineError(f"prompt_logprob_ids must be 0 to {vocab_size - 1}")
    if params.stop:
        raise EngineError("stop texts need a tokenizer; use LLM, or stop_token_ids")
