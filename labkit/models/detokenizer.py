"""Convert token ids to text and back, for servers that accept or return text instead of ids.

Texts of two servers are compared without special tokens, without surrounding space, and without
U+FFFD (which a decoder writes where a token ends inside a character). Servers differ in all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.models.tokenizer import Tokenizer


class Detokenizer:
    """A converter between ids and text with a model's own tokenizer, loaded on first use."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        from labkit.models import tokenizer

        return tokenizer.load(self._model_dir)

    def prompt_text(self, ids: Sequence[int]) -> tuple[str, bool]:
        """Return a prompt as text, and whether the tokenizer encodes that text to the same ids.

        Encoding adds special tokens such as BOS. If the prompt already begins with BOS, its full
        text would get a second one, so the text without the first id is tried as well.
        """
        prompt = list(ids)
        for text in (self.tokenizer.decode(prompt), self.tokenizer.decode(prompt[1:])):
            if self.tokenizer.encode(text) == prompt:
                return text, True
        return self.tokenizer.decode(prompt), False

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens in a text, without the special tokens that encoding adds."""
        return len(self.tokenizer.encode(text, special=False))

    def normalized_text(self, ids: Sequence[int]) -> str:
        """Return the text of output ids, normalized for comparison."""
        return self.normalize(self.tokenizer.decode(ids))

    def normalize(self, text: str) -> str:
        """Return a text for comparison: without special tokens, U+FFFD and surrounding space."""
        for token in self.tokenizer.special_tokens:
            text = text.replace(token, "")
        return text.replace("\ufffd", "").strip()
