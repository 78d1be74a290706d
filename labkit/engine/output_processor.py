"""Turn the token events of a request into text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.engine.engine_protocol import (
    NO_TOKEN,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    TokenEvent,
)
from labkit.engine.incremental_detokenizer import IncrementalDetokenizer
from labkit.engine.request import Request
from labkit.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's output so far: after each token of a stream, or at the end of ``generate``.

    ``token_ids`` include a stop token and the tokens of a stop text, ``text`` excludes both.
    ``delta`` is the text that the last event added. ``logprobs`` has an entry per token, or is None
    if the request did not ask for log probabilities. ``prompt_logprobs`` is None until the prompt
    is computed, or if the request did not ask for it.
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
    prompt_logprobs: PromptLogprobs | None = None


class OutputProcessor:
    """Turns the events of one request into ``RequestOutput``.

    The output that completes a stop text is the request's last, even if the engine's event has no
    ``finish_reason``. The output's own ``finish_reason`` is then "stop", and the caller must abort
    the request in the engine.

    ``prompt`` is the prompt's text, or None if the prompt was given as token ids.
    """

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer) -> None:
        self._request = request
        self._prompt = prompt
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids)
        self._stops = StopTexts(request.params.stop)
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: PromptLogprobs | None = None
        self._text = ""

    def next_output(self, event: TokenEvent) -> RequestOutput:
        delta, reason = self.advance(event)
        self._text += delta
        has_logprobs = self._request.params.logprobs is not None
        return RequestOutput(
            self._request.request_id,
            self._prompt,
            self._request.prompt_token_ids,
            tuple(self._token_ids),
            self._text,
            delta,
            reason,
            event.error,
            tuple(self._logprobs) if has_logprobs else None,
            self._prompt_logprobs,
        )

    def advance(self, event: TokenEvent) -> tuple[str, FinishReason | None]:
        """Process the next event; return the text that the event adds, and the finish reason."""
        delta, reason = self._stops.add(self._add_token(event)), event.finish_reason
        if self._stops.matched is not None:
            reason = "stop"
        elif reason is not None:
            delta += self._stops.finish()
        return delta, reason

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the request, or None."""
        return self._stops.matched

    def _add_token(self, event: TokenEvent) -> str:
        text = ""
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if event.token != NO_TOKEN:
            self._token_ids.append(event.token)
            if event.logprobs is not None:
                self._logprobs.append(event.logprobs)
            if event.finish_reason != "stop":
                text = self._detokenizer.add(event.token)
        return text + (self._detokenizer.finish() if event.finish_reason is not None else "")


class StopTexts:
    """Finds the first stop text in a stream, and holds back text that may begin one.

    The result does not depend on how the text is split into pieces. ``matched`` is the stop text
    that is complete first (the longest, if several are complete at the same character); it ends the
    stream. The number of comparisons is proportional to the length of the stream times the number
    of stop texts, however long they are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [StopMatcher(stop) for stop in stops]
        self._held_back = ""
        self.matched: str | None = None

    def add(self, piece: str) -> str:
        """Add a piece of text; return the text that cannot belong to a stop text."""
        if not self._matchers:
            return piece
        text, self._held_back = self._held_back + piece, ""
        for end, character in enumerate(piece, len(text) - len(piece) + 1):
            complete = [each.stop for each in self._matchers if each.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                return text[: end - len(self.matched)]
        safe = len(text) - max(matcher.length for matcher in self._matchers)
        self._held_back = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """Return the text held back. Call this at the end of the stream."""
        text, self._held_back = self._held_back, ""
        return text


class StopMatcher:
    """Follows how much of a stop text a stream ends with (Knuth, Morris and Pratt 1977).

    ``length`` is the number of characters at the end of the stream that begin the stop text.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        # By the length of a beginning of the stop text, less one: the length of the longest shorter
        # beginning that it ends with. Only those that the stream has reached are computed.
        self._borders = [0]

    def advance(self, character: str) -> bool:
        """Add the stream's next character; return whether it completes the stop text."""
        self.length = self._extended(self.length, character)
        if self.length > len(self._borders):
            self._borders.append(self._extended(self._borders[-1], character))
        is_complete = self.length == len(self.stop)
        if is_complete:
            self.length = self._borders[-1]
        return is_complete

    def _extended(self, length: int, character: str) -> int:
        """Return the ``length`` of a stream that ended with ``length`` and gets a character."""
        while length and self.stop[length] != character:
            length = self._borders[length - 1]
        return length + (self.stop[length] == character)
