"""Incremental detokenisation: token ids to text, one id at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# MAX_WINDOW_IDS limits the ids that are decoded again for each new id. CONTEXT_IDS ids remain when
# the window is cut. They contain any incomplete character, which has at most three bytes, because
# every id has at least one byte.
MAX_WINDOW_IDS, CONTEXT_IDS = 16, 4


class Tokenizer(Protocol):
    """Encodes text as token ids and decodes it."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids. Incomplete characters become U+FFFD."""


class IncrementalDetokenizer:
    """Decodes a growing list of ids. An incomplete character at the end is held back.

    For each new id, a window of the last ids is decoded again. The window contains the ids since
    the text was last complete and some ids before them, because a decoder may treat the first id
    specially.

    Parameters
    ----------
    tokenizer
        Decodes ids.
    prompt
        The ids of the prompt. Their text is not returned, except for an incomplete last character
        that the added ids complete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-CONTEXT_IDS:])
        text = tokenizer.decode(self._window) if self._window else ""
        self._num_returned = len(text)  # characters of the window's text
        # The prompt's text if its last character is incomplete, else "".
        self._open_prompt = text if text.endswith(REPLACEMENT) else ""
        # The window's ids up to which the text was last complete.
        self._num_complete = 0 if self._open_prompt else len(self._window)

    def add(self, token: int) -> str:
        """Add one id; return the text that the id completes ("" if none)."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if self._open_prompt and not text.startswith(self._open_prompt):
            self._open_prompt = ""
            self._num_returned -= 1
        incomplete = text.endswith(REPLACEMENT)
        stop = len(text) - incomplete
        delta = text[self._num_returned : stop]
        self._num_returned = max(self._num_returned, stop)
        if not incomplete:
            self._slide(self._num_complete, complete=True)
        elif len(self._window) > MAX_WINDOW_IDS:
            self._slide(len(self._window) - CONTEXT_IDS, complete=False)
        return delta

    def _slide(self, start: int, *, complete: bool) -> None:
        """Remove the window's ids before index ``start``, whose text was returned before.

        ``complete`` says whether the text of the window ends with a complete character.
        """
        self._window = self._window[start:]
        self._num_complete = len(self._window) if complete else 0
        self._num_returned = len(self._tokenizer.decode(self._window)) - (not complete)
        self._open_prompt = ""

    def finish(self) -> str:
        """Return the text held back. Incomplete characters become U+FFFD."""
        return self._tokenizer.decode(self._window)[self._num_returned :]
