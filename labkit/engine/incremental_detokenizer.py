"""Incremental detokenisation: token ids to text, one id at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.models.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# MAX_WINDOW_IDS limits the ids that are decoded again for each new id. CONTEXT_IDS ids remain when
# the window is cut. They contain any incomplete character, which has at most three bytes, because
# every id has at least one byte.
MAX_WINDOW_IDS, CONTEXT_IDS = 16, 4


class IncrementalDetokenizer:
    """Decodes a growing list of ids. An incomplete character at the end is held back.

    For each new id, a window of the last ids is decoded again. The window contains the ids since
    the text was last complete and some ids before them, because a decoder may treat the first id
    specially. Byte tokens are decoded apart, because one incomplete character at the end of a run
    of them makes the tokenizer return U+FFFD for every byte of the run.

    ``tokenizer``: decodes ids. ``prompt``: the ids of the prompt. Their text is not returned,
    except for an incomplete last character that the added ids complete.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = tokenizer.byte_tokens
        self._bytes = ByteRun()
        self._window = list(prompt[-CONTEXT_IDS:])
        text = tokenizer.decode(self._window) if self._window else ""
        self._num_returned = len(text)  # characters of the window's text
        # The prompt's text if its last character is incomplete, else "".
        self._open_prompt = text if text.endswith(REPLACEMENT) else ""
        # The window's ids up to which the text was last complete.
        self._num_complete = 0 if self._open_prompt else len(self._window)
        # Whether the last id is a byte token.
        self._in_bytes = bool(self._window) and self._window[-1] in self._byte_tokens
        if self._in_bytes:
            self._bytes.begin([self._byte_tokens.get(token) for token in self._window])

    def add(self, token: int) -> str:
        """Add one id; return the text that the id completes ("" if none)."""
        byte = self._byte_tokens.get(token)
        if byte is not None:
            before = "" if self._in_bytes else self.finish()
            self._in_bytes = True
            self._window = [*self._window, token][-CONTEXT_IDS:]  # context of later ids
            return before + self._bytes.add(byte)
        if not self._in_bytes:
            return self._add_text(token)
        run_end, self._in_bytes = self._bytes.end(), False
        self._slide(0, complete=True)
        return run_end + self._add_text(token)

    def _add_text(self, token: int) -> str:
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
        """Remove the window's first ``start`` ids. ``complete``: its last character is complete."""
        self._window = self._window[start:]
        self._num_complete = len(self._window) if complete else 0
        self._num_returned = len(self._tokenizer.decode(self._window)) - (not complete)
        self._open_prompt = ""

    def finish(self) -> str:
        """Return the text held back. Incomplete characters become U+FFFD."""
        if self._in_bytes:
            return self._bytes.end()
        return self._tokenizer.decode(self._window)[self._num_returned :]


class ByteRun:
    """Decodes consecutive byte tokens as UTF-8, each character as soon as it is complete."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_open_prompt = False  # the decoder's incomplete character is the prompt's

    def begin(self, prompt: Sequence[int | None]) -> None:
        """Start with a prompt's incomplete last character. None: the token is not a byte token."""
        for byte in prompt:
            self._decoder.decode(b"" if byte is None else bytes([byte]), final=byte is None)
        self._has_open_prompt = bool(self._decoder.getstate()[0])

    def add(self, byte: int) -> str:
        """Add a byte; return the text that it completes."""
        return self._output(self._decoder.decode(bytes([byte])))

    def end(self) -> str:
        """End the run; return U+FFFD if its last character is incomplete, else nothing."""
        return self._output(self._decoder.decode(b"", final=True))

    def _output(self, text: str) -> str:
        """Return a text without the prompt's own incomplete character."""
        if text and self._has_open_prompt:
            self._has_open_prompt = False
            return text.removeprefix(REPLACEMENT)
        return text
