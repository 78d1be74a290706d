"""The text of token ids, so that people can read a difference between two outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.models.detokenizer import Detokenizer
from labkit.workload.output_digest import text_digest

MAX_DISTINCT_IDS = 4096  # per run; reports show further ids as numbers
MAX_TEXT_LENGTH = 40  # characters of one token's text


class TokenTexts:
    """Converts token ids to text with the model's own tokenizer, loaded on first use.

    ``model_dir``: the directory that holds ``tokenizer.json``.
    """

    def __init__(self, model_dir: Path) -> None:
        self._detokenizer = Detokenizer(model_dir)

    def digest(self, tokens: Sequence[int]) -> str:
        """Return the digest of the text of ``tokens``, for comparison with a server's text."""
        return text_digest(self._detokenizer.normalized_text(tokens))

    def of(self, tokens: Iterable[int]) -> dict[str, str]:
        """Map the first ``MAX_DISTINCT_IDS`` distinct ids, as strings, to their texts.

        Ids without a text in the tokenizer (padding of the vocabulary) are omitted.
        """
        spell = self._detokenizer.tokenizer.piece
        ids = list(dict.fromkeys(tokens))[:MAX_DISTINCT_IDS]
        spelled = ((token, spell(token)) for token in ids)
        return {str(token): text[:MAX_TEXT_LENGTH] for token, text in spelled if text}
