"""Where the time of steps went: each part's time per output token, and each arm's differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# By part of a step (``labkit.engine.runner.step_clocks``), its words, in the order of a step.
PART_NAMES: Mapping[str, str] = {
    "schedule": "the scheduler",
    "draft": "drafting",
    "build": "building the batch",
    "plan": "planning attention",
    "attention": "attention",
    "products": "products with weights",
    "rest": "the rest of the model",
    "model": "the model",
    "sample": "sampling",
    "update": "updating requests",
    "idle": "waiting",
    "stalls": "stalls of single steps",
    "left_over": "left over",
}
MIN_CAUSE_PCT = 0.5
HOST = ("schedule", "draft", "build", "plan", "sample", "update")
MODEL = ("attention", "products", "rest", "model")


@dataclass(frozen=True)
class PartDifference:
    """The difference of one part's time from the baseline, in us per output token.

    The interval and the p-value are adjusted over the parts and arms; None if unknown.
    ``pct``: the difference in percent of the baseline's whole time per token.
    """

    part: str
    us: float
    difference_us: float | None
    low_us: float | None
    high_us: float | None
    pct: float | None
    p_adjusted: float | None


@dataclass(frozen=True)
class ArmTime:
    """An arm's time per output token by part.

    ``total``: the whole time, as a part. ``cause``: the part, or the work (see
    :mod:`labkit.analysis.comparison.step_parts`), whose difference is the largest of those that
    are significant and worth naming; None if no difference is. ``counts``: sentences about
    counters that differ.
    """

    arm: str
    parts: tuple[PartDifference, ...]
    total: PartDifference
    cause: str | None
    counts: tuple[str, ...] = ()

    @property
    def cause_part(self) -> PartDifference | None:
        """The significant part whose difference is largest; see ``cause``."""
        return largest(self.parts) if self.cause is not None else None


@dataclass(frozen=True)
class PartShare:
    """A part's time per output token of the baseline (us), and its share of a step (percent).

    The share has its 95 % interval over processes, None with one process.
    """

    part: str
    us: float
    pct: float
    low_pct: float | None
    high_pct: float | None


@dataclass(frozen=True)
class TimeDivision:
    """Where the time went: the baseline's parts, and the other arms'.

    ``groups``: the shares of attention, of the host and of the products. ``clocks_pct``: what the
    clocks add to a step. ``of_tokens_pct``: the share of the output tokens that turns with clocks
    served. ``tokens``: these tokens in all runs.
    """

    baseline: tuple[PartShare, ...]
    groups: tuple[PartShare, ...]
    arms: tuple[ArmTime, ...]
    clocks_pct: float
    of_tokens_pct: float
    tokens: int

    @property
    def total_us(self) -> float:
        """The baseline's time per output token, in us."""
        return sum(part.us for part in self.baseline)


def largest(parts: tuple[PartDifference, ...]) -> PartDifference | None:
    """Return the part with the largest difference of those whose interval excludes 0, or None.

    A difference below ``MIN_CAUSE_PCT`` of the baseline's whole time is not worth naming.
    """
    found = [
        part
        for part in parts
        if part.low_us is not None
        and part.high_us is not None
        and part.low_us * part.high_us > 0
        and abs(part.pct or 0.0) >= MIN_CAUSE_PCT
    ]
    return max(found, key=lambda part: abs(part.difference_us or 0.0), default=None)
