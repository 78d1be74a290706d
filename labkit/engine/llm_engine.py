"""labkit's own engine: batching over any KV layout; a preset's name says which parts it has."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from labkit.engine.engine_protocol import NO_TOKEN, Counters, EngineError, KVBytes, TokenEvent
from labkit.engine.kv_layout.kv_cache_manager import KVCacheManager
from labkit.engine.request import Request
from labkit.engine.scheduler import Scheduler
from labkit.engine.step_loop import StepLoop

# Counters that are shown even where nothing happened.
COUNTED = (
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
    """Requests in, token events out: what ``InferenceEngine`` asks, around a ``StepLoop``.

    Ids that a prompt may hold are below ``vocab_size``. ``notes`` is what was decided at load,
    for the record, ``decided`` the same as counters: the budget's policy, the type computed in,
    what weights are held in, batch invariance. ``name`` is the preset's; every step counts as
    ``engine.<name>``.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        cache: KVCacheManager,
        loop: StepLoop,
        counters: Counters,
        vocab_size: int,
        notes: Mapping[str, str | float | None],
        decided: Mapping[str, float],
        name: str,
    ) -> None:
        self.name = name
        self.notes = dict(notes)
        self._decided = dict(decided)
        self._scheduler = scheduler
        self._cache = cache
        self._loop = loop
        self._counters = counters
        self._vocab_size = vocab_size
        self._refused: list[TokenEvent] = []

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never be served ends with an error event.

        Raises
        ------
        EngineError
            The request id is live already.
        """
        request_id = request.request_id
        if self._scheduler.is_live(request_id):
            raise EngineError(f"request {request_id}: this id is live already")
        try:
            self._check(request)
            self._scheduler.add(request)
        except EngineError as error:
            self._counters.add("requests.refused")
            event = TokenEvent(request_id, NO_TOKEN, "error", error=str(error))
            self._refused.append(event)

    def _check(self, request: Request) -> None:
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise EngineError(f"request {request.request_id}: the prompt is empty")
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise EngineError(
                f"request {request.request_id}: token ids must be 0 to {self._vocab_size - 1}"
            )
        if max(params.logit_bias, default=0) >= self._vocab_size:
            raise EngineError(
                f"request {request.request_id}: logit_bias names token {max(params.logit_bias)}; "
                f"ids are 0 to {self._vocab_size - 1}"
            )
        if params.stop:
            raise EngineError(
                f"request {request.request_id}: stop texts need a tokenizer; use LLM, or "
                "stop_token_ids"
            )

    def abort(self, request_id: str) -> None:
        """End a request now and free its memory; unknown or finished ids are ignored."""
        self._scheduler.abort(request_id)
        if not self._scheduler.has_work():
            start = time.perf_counter()
            self._loop.discard()
            # The end of the step in flight: a wait, as the loop counts it too.
            self._counters.add("step_ms", (time.perf_counter() - start) * 1e3)
        self._refused = [event for event in self._refused if event.request_id != request_id]

    def has_work(self) -> bool:
        """Tell whether a request is live or a refusal is not yet reported."""
        return bool(self._refused) or self._scheduler.has_work()

    def step(self) -> list[TokenEvent]:
        """Run one batch; return the refusals since the last step, then the batch's tokens.

        An exception aborts every request: what was in flight is not known to be computed.
        """
        start = time.perf_counter()
        events, self._refused = self._refused, []
        try:
            events += self._loop.step()
            if not self._scheduler.has_work():
                self._loop.discard()
        except BaseException:
            self._scheduler.close()
            raise
        finally:
            self._counters.add("step_ms", (time.perf_counter() - start) * 1e3)
        return events

    def is_running(self, request_id: str) -> bool:
        """Tell whether a request has been admitted and has not ended."""
        return self._scheduler.is_running(request_id)

    def kv_bytes(self) -> KVBytes:
        """Say how much KV memory requests hold now, and how much of it is computed.

        Tokens that requests share count once for each, at most up to what is held.
        """
        held = self._cache.reserved_bytes
        computed = self._scheduler.num_computed_tokens * self._cache.token_bytes
        return KVBytes(reserved=held, used=min(held, computed))

    def max_request_tokens(self) -> int:
        """Return how many tokens fit the memory alone; the last one sampled is never computed."""
        return self._cache.capacity_tokens + 1

    def lingering_requests(self) -> Collection[str]:
        """Return the requests that have ended but whose rows every step still computes."""
        return self._cache.lingering_requests()

    def counters(self) -> dict[str, float]:
        """Return the counters of design section 5: steps, tokens, blocks, prefixes, requests, time.

        ``host_ms`` is the time of all steps in which the host did not wait for the model's
        forward, ``device_ms`` that of the forwards; the layout's own are in
        ``KVCacheManager.counters``.
        """
        values = dict.fromkeys(COUNTED, 0.0)
        values |= self._counters.as_dict() | self._scheduler.counts.as_dict()
        return values | {
            f"engine.{self.name}": values["steps.total"],
            "host_ms": values["step_ms"] - values.get("pipeline.wait_ms", values["device_ms"]),
            **self._decided,
            **self._cache.counters(),
        }

    def reset_counters(self) -> None:
        """Start counting anew; peaks of memory restart from what is held."""
        self._counters.reset()
        self._cache.reset_counters()
        self._scheduler.counts.reset()

    def clear_cache(self) -> None:
        """Forget the prefixes that no live request holds."""
        self._cache.clear()

    def close(self) -> None:
        """End every request and drop the model and the KV memory."""
        self._scheduler.close()
        self._refused = []
        self._loop.close()

    def check(self) -> None:
        """Raise ``AssertionError`` unless requests and blocks agree."""
        self._scheduler.check()
