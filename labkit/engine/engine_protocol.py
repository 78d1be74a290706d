"""The protocol of engines, their token events and counters, and optional protocols."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from labkit.engine.request import Request

if TYPE_CHECKING:
    from labkit.engine.runner.step_clocks import StepClocks

FinishReason = Literal["stop", "length", "abort", "error"]
NO_TOKEN = -1
MOST_DEFERRED = 64  # functions whose amounts wait for the next reading of the counters


class EngineError(ValueError):
    """An engine cannot serve a request or a configuration. The message is a single line."""


def check_request(request: Request, vocab_size: int, max_context: int | None) -> None:
    """Raise ``EngineError`` if a model's vocabulary or context (tokens) cannot hold a request."""
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise EngineError("the prompt is empty")
    scored = params.prompt_logprobs is not None and params.max_tokens == 1
    if max_context is not None and len(prompt) + (0 if scored else params.max_tokens) > max_context:
        raise EngineError(
            f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens} exceed the model's "
            f"context of {max_context} tokens"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise EngineError(f"token ids must be 0 to {vocab_size - 1}")


class StaleLaunchError(RuntimeError):
    """An attention kernel wrote the stamp of another launch, so its output may be stale."""


class InvalidLogitsError(RuntimeError):
    """The model computed a row of logits with a NaN, or with nothing but infinities."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log probabilities of the sampled token, and of the likeliest (ids), best first."""

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Natural log probabilities of a prompt's second and later tokens (n = prompt tokens - 1)."""

    # Log probability of each prompt token, given the tokens before it: float64 [n].
    tokens: NDArray[np.float64]
    # top_ids, top: the ids (int32 [n, k]) and log probabilities (float64 [n, k]) of the k likeliest
    # tokens at each position, the likeliest first.
    top_ids: NDArray[np.int32]
    top: NDArray[np.float64]
    # Log probabilities of ``SamplingParams.prompt_logprob_ids``: float64 [n, m].
    scored: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token, or the end of a request without a token.

    ``token`` is ``NO_TOKEN`` for an event without a token (``finish_reason="error"``): the engine
    refused the request, or could not sample its next token. ``error`` is the reason, in one line.
    ``margin`` is the gap between the largest logit, which is the greedy token's, and the second
    largest. It is None if the token was drawn at random. Only the last event of a request has a
    ``finish_reason``. An aborted request has no event after its abort. ``logprobs`` is None
    unless the request asked for log probabilities. ``num_cached_tokens`` is the number of the
    request's prompt tokens that the prefix cache held when the request was first admitted.
    ``prompt_logprobs`` is set in the request's first event, if the request asked for it.
    """

    request_id: str
    token: int
    finish_reason: FinishReason | None
    margin: float | None = None
    error: str | None = None
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent(TokenEvent):
    """An event of a server's stream. ``received`` is its arrival time on ``time.perf_counter``.

    If the server sends token ids, the event has a ``token``. Otherwise the event has a ``text``,
    and ``token`` is ``NO_TOKEN``. The last event of a request has neither a token nor a text. In
    this event, ``counted`` is the number of output tokens, ``first_chunk`` the number of those in
    the first chunk (1 if unknown), ``untimed_tokens`` the number of those after the last chunk and,
    if the server sends no ids, ``whole`` is the request's complete text, normalised for comparison.
    """

    received: float = 0.0
    text: str = ""
    counted: int | None = None
    first_chunk: int = 1
    untimed_tokens: int = 0
    whole: str | None = None


class Counters:
    """Named sums and peaks of one engine."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(int)
        self._deferred: list[Callable[[], Mapping[str, float]]] = []

    def add(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to ``name``."""
        self._values[name] += amount

    def record_peak(self, name: str, value: float) -> None:
        """Raise the counter ``name`` to ``value`` if the counter is smaller."""
        self._values[name] = max(self._values[name], value)

    def add_all(self, amounts: Mapping[str, float]) -> None:
        """Add each amount to the counter of its name."""
        values = self._values
        for name, amount in amounts.items():
            values[name] += amount

    def defer(self, amounts: Callable[[], Mapping[str, float]]) -> None:
        """Call ``amounts`` when the counters are next read, and add the result then.

        If too many functions wait, the oldest is called now.
        """
        self._deferred.append(amounts)
        if len(self._deferred) > MOST_DEFERRED:
            self.add_all(self._deferred.pop(0)())

    def flush(self) -> None:
        """Call the deferred functions and add their amounts now."""
        deferred, self._deferred = self._deferred, []
        for amounts in deferred:
            self.add_all(amounts())

    def reset(self) -> None:
        """Remove every sum and peak."""
        self.flush()
        self._values.clear()

    def value(self, name: str) -> float:
        """Return one counter, without what deferred functions will add."""
        return self._values.get(name, 0)

    def as_dict(self, *, flush: bool = True) -> dict[str, float]:
        """Return the sums and peaks, without ``flush`` not those of the deferred functions."""
        if flush:
            self.flush()
        return dict(self._values)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """KV bytes ``reserved`` for requests, ``used`` by tokens and in ``total`` (None: no limit)."""

    reserved: int
    used: int
    total: int | None = None


@runtime_checkable
class Observable(Protocol):
    """An engine whose state can be read between two steps (in 1 or 2 microseconds)."""

    def is_running(self, request_id: str) -> bool:
        """Return whether a request is admitted and has not ended."""

    def kv_bytes(self) -> KVBytes:
        """Return the KV memory reserved and used now."""


@runtime_checkable
class TokenCounting(Protocol):
    """An engine whose computed tokens can be read after a step without reading all counters."""

    def computed_tokens(self) -> float:
        """Return the counter ``tokens.computed``."""


@runtime_checkable
class SelfChecking(Protocol):
    """An engine that can check its own bookkeeping while it has no work."""

    def check(self) -> None:
        """Raise ``AssertionError`` unless requests, blocks and prefix cache agree."""


class StepReport(Protocol):
    """The steps that an engine has traced."""

    def report(self) -> dict[str, Any]:
        """Return the traced steps as JSON values; ``labkit.engine.step_trace`` describes them."""


@runtime_checkable
class StepTracing(Protocol):
    """An engine that can record what its steps do."""

    def trace_steps(self, limit: int, clock: Callable[[], float]) -> StepReport:
        """Trace the next ``limit`` steps. There must be no request in flight.

        ``clock`` returns seconds and must be callable from any thread.
        """


@runtime_checkable
class StepTiming(Protocol):
    """An engine whose steps can be timed by part."""

    def time_steps(self, clock: Callable[[], float]) -> StepClocks:
        """Time the parts of all later steps, and trace none. No request may be in flight.

        ``clock`` returns seconds and must be callable from any thread.
        """


@runtime_checkable
class LengthLimited(Protocol):
    """An engine with a limit on the length of a request."""

    def max_request_tokens(self) -> int:
        """Return the largest number of tokens, prompt and output, that a request may have."""


@runtime_checkable
class StaticBatching(Protocol):
    """An engine that may compute the rows of finished requests until their batch ends."""

    def lingering_requests(self) -> Collection[str]:
        """Return the ids of the finished requests whose rows every step still computes."""


@runtime_checkable
class PipelinedEngine(Protocol):
    """An engine whose computation continues between two calls of ``step``."""

    def drain(self) -> None:
        """Wait until nothing is being computed. The next ``step`` returns the results."""


@runtime_checkable
class Remote(Protocol):
    """An engine whose tokens another process computes. Its events have the time of arrival."""

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Make ``clock`` the source of all later times. There must be no request in flight.

        ``clock`` returns seconds and must be callable from any thread. The default is
        ``time.perf_counter``.
        """

    def wait(self, seconds: float) -> None:
        """Wait until an event has arrived, or until ``seconds`` have passed."""

    def prepare_requests(self, requests: Sequence[Request], streams: int) -> None:
        """Prepare to send ``requests``, and measure the time that the client alone spends.

        ``streams``: the number of concurrent requests in that measurement.
        """

    def process_memory(self) -> dict[str, float]:
        """Return the memory of the computing processes: bytes by name, empty if unknown."""

    def check_running(self) -> None:
        """Raise :class:`EngineError` if the computing process has ended, if labkit started it."""


class InferenceEngine(Protocol):
    """An engine: requests in, timed token events out, and counters of what ran."""

    name: str

    def submit(self, request: Request) -> None:
        """Queue a request. A request that can never be served ends with an error event.

        Raises ``EngineError`` if a live request has this id already.
        """

    def abort(self, request_id: str) -> None:
        """End a request now and release its memory. Unknown or finished ids are ignored."""

    def step(self) -> list[TokenEvent]:
        """Run one batch and return its events, in the order of the batch."""

    def has_work(self) -> bool:
        """Return whether the next ``step`` has something to compute or to report."""

    def counters(self) -> dict[str, float]:
        """Return the counters since the last reset."""

    def reset_counters(self) -> None:
        """Set the counters to 0 and each peak to its present value."""

    def clear_cache(self) -> None:
        """Empty the prefix cache, so that later requests have no cached prefix."""

    def close(self) -> None:
        """Release the model and the KV memory."""
