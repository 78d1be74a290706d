"""Speculative decoding: who drafts, how many tokens, and how they are verified."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, ReadBy, option, require


class Speculation(Enum):
    """Who drafts tokens: nobody, the request's own text, a smaller model, or chance (a control)."""

    none = "none"
    ngram = "ngram"
    draft = "draft"
    random = "random"


class Verification(Enum):
    """How drafts are laid out: one causal segment, or a segment of one token for each."""

    window = "window"
    staircase = "staircase"


SPECULATION = "engine.speculation"
DRAFTED = ReadBy(SPECULATION, (Speculation.ngram, Speculation.draft, Speculation.random))
BY_NGRAM = ReadBy(SPECULATION, (Speculation.ngram,))
BY_MODEL = ReadBy(SPECULATION, (Speculation.draft,))


@dataclass
class Drafts(Group, place="engine.drafts"):
    """Speculation's drafts: how many, how they are verified, and where they come from."""

    num_draft_tokens: int = option(
        4, "Drafts per request and step, at most.", least=1, most=64, unit="tokens", read_by=DRAFTED
    )
    verification: Verification = option(Verification.window, read_by=DRAFTED)
    ngram_min: int = option(
        1,
        "The shortest n-gram that is looked up.",
        least=1,
        most=16,
        unit="tokens",
        read_by=BY_NGRAM,
    )
    ngram_max: int = option(
        4,
        "The longest n-gram that is looked up.",
        least=1,
        most=16,
        unit="tokens",
        read_by=BY_NGRAM,
    )
    draft_path: str | None = option(
        None,
        "The draft model's directory, of the same vocabulary.",
        null="the model itself, or its first layers",
        read_by=BY_MODEL,
    )
    draft_layers: int | None = option(
        None,
        "The layers of the model itself, from the first, that draft.",
        least=1,
        unit="layers",
        null="all of them",
        read_by=BY_MODEL,
    )

    def __post_init__(self) -> None:
        """Check what spans options."""
        super().__post_init__()
        require(
            self.ngram_min <= self.ngram_max,
            f"engine.drafts.ngram_min={self.ngram_min}: must be at most "
            f"engine.drafts.ngram_max={self.ngram_max}",
        )
        require(
            self.draft_path is None or self.draft_layers is None,
            f"engine.drafts.draft_layers={self.draft_layers}: it cuts the model itself, and "
            "engine.drafts.draft_path names another; set one of them",
        )
