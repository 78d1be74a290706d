"""Special tokens in a text that must be tokenised as plain text."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any


class SpecialTokenEscape:
    """Keeps special tokens that a user wrote from acting as control tokens.

    A marker is inserted inside every special token in the user's strings. The rendered prompt is
    then split at the markers into pieces for ``Tokenizer.encode_pieces``. The chat template's own
    special tokens stay whole and keep their effect. The user's are cut in two and become plain
    text. If ``special_tokens`` is empty, nothing is marked.
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
