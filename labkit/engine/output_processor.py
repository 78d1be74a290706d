"""From token events to text, one request at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from labkit.engine.base import NO_TOKEN, FinishReason, TokenEvent

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; incomplete characters become U+FFFD."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's result, or in a stream its state after one more token.

    ``text`` leaves out a stop token; ``token_ids`` holds it. ``delta`` is the text that
    the last event added.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    delta: str
    finish_reason: FinishReason | None
    error: str | None


class Detokenizer:
    """Decodes a growing list of ids; holds back a character until all its bytes are there.

    Only the ids since the last complete piece of text are decoded again, together with
    the piece before it, since a decoder may treat the first id in a special way.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._before = 0
        self._read = 0

    def add(self, token: int) -> str:
        """Take one id; return the text it completes, "" if none yet."""
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """Return the text held back, incomplete characters as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        shown = self._tokenizer.decode(self._ids[self._before : self._read])
        text = self._tokenizer.decode(self._ids[self._before :])
        if len(text) <= len(shown) or (text.endswith(REPLACEMENT) and not final):
            return ""
        self._before, self._read = self._read, len(self._ids)
        return text[len(shown) :]


class OutputProcessor:
    """One request's events as ``RequestOutput``."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        tokenizer: Tokenizer,
    ) -> None:
        self._identity = (request_id, prompt, prompt_token_ids)
        self._detokenizer = Detokenizer(tokenizer)
        self._token_ids: list[int] = []
        self._text = ""

    def process(self, event: TokenEvent) -> RequestOutput:
        """Take the request's next event."""
        delta = ""
        if event.token != NO_TOKEN:
            self._token_ids.append(event.token)
            if event.finish_reason != "stop":
                delta = self._detokenizer.add(event.token)
        if event.finish_reason is not None:
            delta += self._detokenizer.finish()
        self._text += delta
        return RequestOutput(
            *self._identity,
            tuple(self._token_ids),
            self._text,
            delta,
            event.finish_reason,
            event.error,
        )
