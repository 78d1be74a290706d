"""What every engine shares: token events, counters and the small protocol around them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from labkit.engine.request import Request

FinishReason = Literal["stop", "length", "abort", "error"]
NO_TOKEN = -1


class EngineError(ValueError):
    """Why an engine cannot serve, in one line."""


class StaleLaunchError(RuntimeError):
    """An attention launch left another launch's stamp: its output must not be trusted."""


class InvalidLogitsError(RuntimeError):
    """The model computed logits that are not numbers."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log probabilities at one position: of the token, and of the likeliest ids.

    ``top`` holds (id, log probability), the likeliest first.
    """

    token: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token, or the end of a request that yields no more.

    ``token`` is ``NO_TOKEN`` for an event that carries none (``finish_reason="error"``).
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
    """What a server's stream brought at ``received`` (on ``time.perf_counter``).

    A token whose id the server tells, or a ``text`` without one (``token=NO_TOKEN``). The last
    event carries neither. It says how many tokens were ``counted``, and the ``whole`` text as
    texts are compared, where no ids were told.
    """

    received: float = 0.0
    text: str = ""
    counted: int | None = None
    whole: str | None = None


class Counters:
    """Named sums and peaks.  Each engine owns one; nothing is shared."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(int)
        self._owed: list[Callable[[], Mapping[str, float]]] = []

    def add(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to ``name``."""
        self._values[name] += amount

    def record_peak(self, name: str, amount: float) -> None:
        """Raise ``name`` to ``amount`` if it is below: for peaks."""
        self._values[name] = max(self._values[name], amount)

    def add_all(self, amounts: Mapping[str, float]) -> None:
        """Add every amount to its name."""
        values = self._values
        for name, amount in amounts.items():
            values[name] += amount

    def defer(self, amounts: Callable[[], Mapping[str, float]]) -> None:
        """Ask for amounts, once, when the counters are next looked at."""
        self._owed.append(amounts)

    def flush(self) -> None:
        """Add what is owed."""
        owed, self._owed = self._owed, []
        for amounts in owed:
            self.add_all(amounts())

    def reset(self) -> None:
        """Forget everything."""
        self.flush()
        self._values.clear()

    def as_dict(self) -> dict[str, float]:
        """Return a copy."""
        self.flush()
        return dict(self._values)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """KV memory at one moment, in bytes: ``reserved`` for requests, ``used`` by computed tokens."""

    reserved: int
    used: int


@runtime_checkable
class Observable(Protocol):
    """What an engine may offer besides: a look between two steps, in a microsecond or two."""

    def is_running(self, request_id: str) -> bool:
        """Tell whether a request has been admitted and has not ended."""

    def kv_bytes(self) -> KVBytes:
        """Say how much KV memory requests hold now, and how much of it is computed."""


@runtime_checkable
class LengthLimited(Protocol):
    """What an engine offers whose memory for a request has a known end."""

    def max_request_tokens(self) -> int:
        """Return how many tokens, prompt and output together, a request may have at most."""


@runtime_checkable
class StaticBatching(Protocol):
    """What an engine with static batches may offer besides."""

    def lingering_requests(self) -> Collection[str]:
        """Return the requests that have ended but whose rows every step still computes."""


@runtime_checkable
class PipelinedEngine(Protocol):
    """What an engine offers that computes between two steps."""

    def drain(self) -> None:
        """Wait until nothing is computed any more; the next step finds its results."""


@runtime_checkable
class Remote(Protocol):
    """What an engine offers whose tokens another process computes; its events carry their time."""

    def wait(self, seconds: float) -> None:
        """Wait until something has arrived, at most so long."""

    def prepare_requests(self, requests: Sequence[Request], streams: int) -> None:
        """Make ready what the client needs to send these requests, so many at once.

        What the client alone costs is measured, beside the engine.
        """

    def process_memory(self) -> dict[str, float]:
        """Return what the processes that compute hold, bytes by name; empty: not known."""


class InferenceEngine(Protocol):
    """Requests in, timed token events out, and counters that say what ran."""

    name: str

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never be served ends with an error event.

        Raises
        ------
        EngineError
            The request id is already live.
        """

    def abort(self, request_id: str) -> None:
        """End a request now and free what it holds; unknown or finished ids are ignored."""

    def step(self) -> list[TokenEvent]:
        """Run one batch and return its events, in the order of the batch."""

    def has_work(self) -> bool:
        """Tell whether another ``step`` would do or report anything."""

    def counters(self) -> dict[str, float]:
        """Return what was counted since the last reset."""

    def reset_counters(self) -> None:
        """Start counting anew; peaks restart from what is held now."""

    def clear_cache(self) -> None:
        """Forget what is kept of finished requests, so that the next ones find nothing."""

    def close(self) -> None:
        """Release the memory held."""
