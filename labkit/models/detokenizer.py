"""Token ids as text and back: what a server is sent that takes no ids, and what its text is worth.

Two texts are compared without special tokens, without the space around them, and without U+FFFD,
which stands where a token ends inside a character: servers differ in all three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.models.tokenizer import Tokenizer


class Detokenizer:
    """Spells with a model's own tokenizer, which is loaded on first use."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself."""
        from labkit.models import tokenizer

        return tokenizer.load(self._model_dir)

    def prompt(self, ids: Sequence[int]) -> tuple[str, bool]:
        """Return a prompt as text, and whether the tokenizer turns it into the same ids again.

        A server adds the special tokens that the tokenizer's own files say, so that a first id
        which comes back twice is left out.
        """
        read = self.tokenizer
        whole = list(ids)
        for text in (read.decode(whole), read.decode(whole[1:])):
            if read.encode(text) == whole:
                return text, True
        return read.decode(whole), False

    def count(self, text: str) -> int:
        """Return how many tokens a text is."""
        return len(self.tokenizer.encode(text, special=False))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an output's ids as texts are compared."""
        return self.plain(self.tokenizer.decode(ids))

    def plain(self, text: str) -> str:
        """Return a text as texts are compared."""
        for token in self.tokenizer.special_tokens:
            text = text.replace(token, "")
        return text.replace("\ufffd", "").strip()


def text_digest(text: str) -> str:
    """Name a text: 16 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
