"""The protocol of engines: token events, counters, and what an engine may offer besides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from labkit.engine.request import Request

FinishReason = Literal["stop", "length", "abort", "error"]
NO_TOKEN = -1


class EngineError(ValueError):
    """An engine cannot serve a request or a configuration; the message is one line."""


class StaleLaunchError(RuntimeError):
    """An attention launch left the stamp of another launch; its output is not to be trusted."""


class InvalidLogitsError(RuntimeError):
    """The model computed logits that are NaN, or nothing but infinities."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log probabilities at one position: of the token, and of the likeliest tokens.

    ``top`` has pairs (token id, log probability), the likeliest first.
    """

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token, or the end of a request without a token.

    ``token`` is ``NO_TOKEN`` for an event without a token (``finish_reason="error"``).
    ``margin`` is the logit gap between the greedy token and the next best one; None when
    the token was drawn at random. A request's last event, and only that, has a
    ``finish_reason``; an aborted request has no event after its abort. ``logprobs`` is
    None unless the request asked for them.
    """

    request_id: str
    token: int
    finish_reason: FinishReason | None
    margin: float | None = None
    error: str | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent(TokenEvent):
    """An event of a server's stream, received at ``received`` (on ``time.perf_counter``).

    It has a token if the server sends token ids, else a ``text`` (``token=NO_TOKEN``). The last
    event has neither: it has the number of tokens ``counted`` and, if the server sends no ids,
    the ``whole`` text in the form in which texts are compared.
    """

    received: float = 0.0
    text: str = ""
    counted: int | None = None
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
        """Set ``name`` to ``value`` if that is larger."""
        self._values[name] = max(self._values[name], value)

    def add_all(self, amounts: Mapping[str, float]) -> None:
        """Add every amount to its name."""
        values = self._values
        for name, amount in amounts.items():
            values[name] += amount

    def defer(self, amounts: Callable[[], Mapping[str, float]]) -> None:
        """Call ``amounts`` and add its result when the counters are next read."""
        self._deferred.append(amounts)

    def flush(self) -> None:
        """Add the deferred amounts."""
        deferred, self._deferred = self._deferred, []
        for amounts in deferred:
            self.add_all(amounts())

    def reset(self) -> None:
        """Remove every sum and peak."""
        self.flush()
        self._values.clear()

    def as_dict(self) -> dict[str, float]:
        """Return a copy of the sums and peaks."""
        self.flush()
        return dict(self._values)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """KV memory at one moment, in bytes: ``reserved`` for requests, ``used`` by computed tokens."""

    reserved: int
    used: int


@runtime_checkable
class Observable(Protocol):
    """An engine whose state can be read between two steps, in one or two microseconds."""

    def is_running(self, request_id: str) -> bool:
        """Return whether a request is admitted and has not ended."""

    def kv_bytes(self) -> KVBytes:
        """Return the KV memory reserved and used now."""


@runtime_checkable
class LengthLimited(Protocol):
    """An engine that limits the length of a request."""

    def max_request_tokens(self) -> int:
        """Return the most tokens, prompt and output together, that a request may have."""


@runtime_checkable
class StaticBatching(Protocol):
    """An engine that may compute the rows of finished requests until their batch ends."""

    def lingering_requests(self) -> Collection[str]:
        """Return the finished requests whose rows every step still computes."""


@runtime_checkable
class PipelinedEngine(Protocol):
    """An engine that computes between two calls of ``step``."""

    def drain(self) -> None:
        """Wait until nothing is being computed; the next step returns the results."""


@runtime_checkable
class Remote(Protocol):
    """An engine whose tokens another process computes; its events have arrival times."""

    def wait(self, seconds: float) -> None:
        """Wait until an event has arrived, at most ``seconds``."""

    def prepare_requests(self, requests: Sequence[Request], streams: int) -> None:
        """Prepare to send these requests, at most ``streams`` at once.

        The client's own cost for them is measured, without the engine.
        """

    def process_memory(self) -> dict[str, float]:
        """Return the memory of the computing processes, bytes by name; empty if unknown."""


class InferenceEngine(Protocol):
    """An engine: requests in, timed token events out, and counters of what ran."""

    name: str

    def submit(self, request: Request) -> None:
        """Queue a request. A request that can never be served ends with an error event.

        Raises
        ------
        EngineError
            The request id is already live.
        """

    def abort(self, request_id: str) -> None:
        """End a request now and release its memory; unknown or finished ids are ignored."""

    def step(self) -> list[TokenEvent]:
        """Run one batch and return its events, in the order of the batch."""

    def has_work(self) -> bool:
        """Return whether another ``step`` would compute or report anything."""

    def counters(self) -> dict[str, float]:
        """Return the counters since the last reset."""

    def reset_counters(self) -> None:
        """Set the counters to 0 and the peaks to what is reserved now."""

    def clear_cache(self) -> None:
        """Empty the prefix cache, so that later requests find nothing cached."""

    def close(self) -> None:
        """Release the model and the KV memory."""
