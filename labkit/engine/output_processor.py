"""From token events to text, one request at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from labkit.engine.base import NO_TOKEN, FinishReason, TokenEvent

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Ids decoded again at most. A character lacks its end after at most three bytes, and an id
# has at least one, so the last few ids always hold the whole of what is incomplete.
WINDOW, KEPT = 16, 4


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

    A window of the last ids is decoded again for each new one: those since the text was
    last complete, with the piece before them, since a decoder may treat the first id in a
    special way. What is incomplete decodes to one U+FFFD at the end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._complete = 0  # ids of the window up to where the text was last complete
        self._shown = 0  # characters of the window's text that were returned

    def add(self, token: int) -> str:
        """Take one id; return the text it completes, "" if none yet."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        held = text.endswith(REPLACEMENT)
        whole = len(text) - held
        delta = text[self._shown : whole]
        self._shown = max(self._shown, whole)
        if not held:
            self._slide(self._complete, whole=True)
        elif len(self._window) > WINDOW:
            self._slide(len(self._window) - KEPT, whole=False)
        return delta

    def _slide(self, start: int, *, whole: bool) -> None:
        """Forget the window's ids before ``start``; all text but an incomplete end is shown."""
        self._window = self._window[start:]
        self._complete = len(self._window) if whole else 0
        self._shown = len(self._tokenizer.decode(self._window)) - (not whole)

    def finish(self) -> str:
        """Return the text held back, incomplete characters as U+FFFD."""
        return self._tokenizer.decode(self._window)[self._shown :]


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
