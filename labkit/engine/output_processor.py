"""From token events to text, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.engine.engine_protocol import NO_TOKEN, FinishReason, Logprobs, TokenEvent
from labkit.engine.incremental_detokenizer import IncrementalDetokenizer, Tokenizer
from labkit.engine.request import Request


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's result, or in a stream its state after one more token.

    ``text`` leaves out a stop token and a stop text; ``token_ids`` holds them. ``delta``
    is the text that the last event added. ``logprobs`` has an entry per token, or is
    None where the request asked for none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    delta: str
    finish_reason: FinishReason | None
    error: str | None
    logprobs: tuple[Logprobs, ...] | None = None


class OutputProcessor:
    """One request's events as ``RequestOutput``.

    The output that completes a stop text is the request's last, whatever its event says:
    its ``finish_reason`` is "stop", and whoever drives the engine ends the request there.

    ``prompt``: as text, None where it came as ids.
    """

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer) -> None:
        self._request = request
        self._prompt = prompt
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids)
        self._stops = StopTexts(request.params.stop)
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._text = ""

    def process(self, event: TokenEvent) -> RequestOutput:
        """Take the request's next event."""
        delta, reason = self.advance(event)
        self._text += delta
        asked = self._request.params.logprobs is not None
        return RequestOutput(
            self._request.request_id,
            self._prompt,
            self._request.prompt_token_ids,
            tuple(self._token_ids),
            self._text,
            delta,
            reason,
            event.error,
            tuple(self._logprobs) if asked else None,
        )

    def advance(self, event: TokenEvent) -> tuple[str, FinishReason | None]:
        """Take the request's next event; return the text that it adds, and how it ends."""
        delta, reason = self._stops.add(self._read(event)), event.finish_reason
        if self._stops.hit is not None:
            reason = "stop"
        elif reason is not None:
            delta += self._stops.finish()
        return delta, reason

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the request; None: none did."""
        return self._stops.hit

    def _read(self, event: TokenEvent) -> str:
        """Note the event's token; return the text that is complete with it."""
        text = ""
        if event.token != NO_TOKEN:
            self._token_ids.append(event.token)
            if event.logprobs is not None:
                self._logprobs.append(event.logprobs)
            if event.finish_reason != "stop":
                text = self._detokenizer.add(event.token)
        return text + (self._detokenizer.finish() if event.finish_reason is not None else "")


class StopTexts:
    """Looks for the first stop text; holds back what may be the beginning of one.

    What is returned for a text does not depend on how it is cut into pieces: the stop
    text that is complete first ends it, the longest of those that end together: ``hit``.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def add(self, piece: str) -> str:
        """Take more text; return what is certainly before any stop text."""
        if not self._stops:
            return piece
        text, self._held = self._held + piece, ""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, begin, self.hit = min(found)
            return text[:begin]
        shown = len(text) - self._begun(text)
        self._held = text[shown:]
        return text[:shown]

    def _begun(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0

    def finish(self) -> str:
        """Return what was held back: no stop text came of it."""
        held, self._held = self._held, ""
        return held
