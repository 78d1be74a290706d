"""Special tokens in a text that must be tokenised as plain text."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any


class SpecialTokenEscape:
    """Marks special tokens in strings, so that a text with the strings can be split inside them.

    A chat template writes special tokens between the strings of a conversation. Tokenised piece by
    piece, the template's tokens act and those in the strings do not. Without ``special_tokens``,
    nothing is marked.
    """

    def __init__(self, special_tokens: Sequence[str]) -> None:
        tokens = sorted((token for token in special_tokens if len(token) > 1), key=len)
        self._marker = f"<{uuid.uuid4().hex}>"
        self._pattern = re.compile("|".join(map(re.escape, reversed(tokens)))) if tokens else None

    def mark(self, value: Any) -> Any:
        """Return JSON-like data with a marker inside every special token of its strings."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(self._mark_token, value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def _mark_token(self, match: re.Match[str]) -> str:
        return f"{match[0][0]}{self._marker}{match[0][1:]}"

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text between the markers."""
        return text.split(self._marker)
