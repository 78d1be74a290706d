"""Speculative decoding: the source of drafts, their number, and their verification."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from labkit.config.option import Group, ReadBy, option, require


class Speculation(Enum):
    """Source of draft tokens: none, n-gram lookup in the request, a draft model, or random."""

    none = "none"
    ngram = "ngram"
    draft = "draft"
    random = "random"


class Verification(Enum):
    """How a step lays out the draft tokens that it verifies.

    window: in one causal segment. staircase: in one single-token segment per draft.
    """

    window = "window"
    staircase = "staircase"


SPECULATION = "engine.speculation"
DRAFTED = ReadBy(SPECULATION, (Speculation.ngram, Speculation.draft, Speculation.random))
BY_NGRAM = ReadBy(SPECULATION, (Speculation.ngram,))
BY_MODEL = ReadBy(SPECULATION, (Speculation.draft,))


@dataclass
class Drafts(Group, place="engine.drafts"):
    """The drafts of speculative decoding: their number, source and verification."""

    num_draft_tokens: int = option(
        4, "Maximum draft tokens per request and step.", ge=1, le=64, unit="tokens", read_by=DRAFTED
    )
    verification: Verification = option(Verification.window, read_by=DRAFTED)
    ngram_min: int = option(
        1,
        "Length of the shortest n-gram that is looked up.",
        ge=1,
        le=16,
        unit="tokens",
        read_by=BY_NGRAM,
    )
    ngram_max: int = option(
        4,
        "Length of the longest n-gram that is looked up.",
        ge=1,
        le=16,
        unit="tokens",
        read_by=BY_NGRAM,
    )
    draft_path: str | None = option(
        None,
        "Directory of the draft model, which must have the same vocabulary.",
        null_means="the model itself, or its first layers",
        read_by=BY_MODEL,
    )
    draft_layers: int | None = option(
        None,
        "Use the first layers of the model itself as the draft model.",
        ge=1,
        unit="layers",
        null_means="all layers",
        read_by=BY_MODEL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.ngram_min <= self.ngram_max,
            f"engine.drafts.ngram_min={self.ngram_min}: must be at most "
            f"engine.drafts.ngram_max={self.ngram_max}",
        )
        require(
            self.draft_path is None or self.draft_layers is None,
            f"engine.drafts.draft_layers={self.draft_layers}: it truncates the model itself, "
            "and engine.drafts.draft_path names another model; set only one of them",
        )
