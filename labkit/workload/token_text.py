"""The text of token ids, so that a difference between two outputs can be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.models.detokenizer import Detokenizer, text_digest

MOST = 4096  # distinct ids per run; the ids beyond are shown as numbers
LONGEST = 40  # characters of a piece


class TokenTexts:
    """Spells token ids with a model's own tokenizer, which is loaded on first use.

    Parameters
    ----------
    model_dir
        The directory that holds ``tokenizer.json``.
    """

    def __init__(self, model_dir: Path) -> None:
        self._detokenizer = Detokenizer(model_dir)

    def digest(self, tokens: Sequence[int]) -> str:
        """Name the text of an output, by which it is compared where only a text is known."""
        return text_digest(self._detokenizer.normalized_text(tokens))

    def of(self, tokens: Iterable[int]) -> dict[str, str]:
        """Return id -> text for the first ``MOST`` distinct ids, in the order they occur.

        Ids that the tokenizer does not know (padding of the vocabulary) are left out.
        """
        spell = self._detokenizer.tokenizer.piece
        ids = list(dict.fromkeys(tokens))[:MOST]
        spelled = ((token, spell(token)) for token in ids)
        return {str(token): text[:LONGEST] for token, text in spelled if text}
