"""Speculation's drafts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from labkit.config.choices import Speculation, Verification
from labkit.config.rules import require


@dataclass
class Drafts:
    """Speculation's drafts: how many, how they are verified, and where they come from.

    ``num_draft_tokens``: per request and step, at most. ``ngram_min``, ``ngram_max``: tokens
    in the n-grams that ngram looks up. ``draft_path``: the draft model's directory, of the
    same vocabulary; null: the model itself, or its first ``draft_layers`` layers.
    """

    num_draft_tokens: int = 4
    verification: Verification = Verification.window
    ngram_min: int = 1
    ngram_max: int = 4
    draft_path: str | None = None
    draft_layers: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            1 <= self.num_draft_tokens <= 64,
            f"engine.drafts.num_draft_tokens={self.num_draft_tokens}: allowed are 1 to 64",
        )
        require(
            1 <= self.ngram_min <= self.ngram_max <= 16,
            f"engine.drafts.ngram_min={self.ngram_min}: allowed are 1 to "
            f"engine.drafts.ngram_max={self.ngram_max}, and that at most 16",
        )
        require(
            self.draft_layers is None or self.draft_layers >= 1,
            f"engine.drafts.draft_layers={self.draft_layers}: allowed are 1 or more, or null",
        )
        require(
            self.draft_path is None or self.draft_layers is None,
            f"engine.drafts.draft_layers={self.draft_layers}: it cuts the model itself, and "
            "engine.drafts.draft_path names another; set one of them",
        )

    def check_read_by(self, speculation: Speculation) -> None:
        """Refuse what is set and not read."""
        readers = {
            "num_draft_tokens": (Speculation.ngram, Speculation.draft),
            "verification": (Speculation.ngram, Speculation.draft),
            "ngram_min": (Speculation.ngram,),
            "ngram_max": (Speculation.ngram,),
            "draft_path": (Speculation.draft,),
            "draft_layers": (Speculation.draft,),
        }
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            require(
                value == item.default or speculation in readers[item.name],
                f"engine.drafts.{item.name}={getattr(value, 'value', value)}: "
                f"engine.speculation={speculation.value} does not read it; it is for "
                f"{', '.join(reader.value for reader in readers[item.name])}",
            )
