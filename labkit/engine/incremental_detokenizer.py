"""From token ids to text, one id at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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


class IncrementalDetokenizer:
    """Decodes a growing list of ids; holds back a character until all its bytes are there.

    A window of the last ids is decoded again for each new one: those since the text was
    last complete, with the piece before them, since a decoder may treat the first id in a
    special way.

    Parameters
    ----------
    tokenizer
        Decodes ids.
    prompt
        The ids before the first one added. Their text is not returned, but for a last
        character that only what is added completes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-KEPT:])
        text = tokenizer.decode(self._window) if self._window else ""
        self._shown = len(text)  # characters of the window's text that were returned
        # The prompt's text where its last character may yet be completed, else "".
        self._open_prompt = text if text.endswith(REPLACEMENT) else ""
        # Ids of the window up to where the text was last complete.
        self._complete = 0 if self._open_prompt else len(self._window)

    def add(self, token: int) -> str:
        """Take one id; return the text it completes, "" if none yet."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if self._open_prompt and not text.startswith(self._open_prompt):
            self._open_prompt = ""
            self._shown -= 1
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
        self._open_prompt = ""

    def finish(self) -> str:
        """Return the text held back, incomplete characters as U+FFFD."""
        return self._tokenizer.decode(self._window)[self._shown :]
