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
STALLS = "stalls"  # not in the whole time
HOST = ("schedule", "draft", "build", "plan", "sample", "update")
MODEL = ("attention", "products", "rest", "model")
MIN_CAUSE_PCT = 0.5  # of the baseline's whole time; a smaller difference is not worth naming


@dataclass(frozen=True)
class PartDifference:
    """A part's time and its difference from the baseline, in us per output token.

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

    ``total``: the whole time, as a part. ``cause``: the first cause of an effect that the study
    claims: a part, or the work that explains it (:mod:`labkit.analysis.comparison.step_parts`);
    None if there is none. ``counts``: sentences about counters that differ.
    """

    arm: str
    parts: tuple[PartDifference, ...]
    total: PartDifference
    cause: str | None
    counts: tuple[str, ...] = ()

    @property
    def cause_part(self) -> PartDifference | None:
        """The part that differs most, surely and in the whole's direction; None if none does."""
        sign = 1.0 if (self.total.pct or 0.0) > 0 else -1.0
        sure = (p for p in self.parts if (p.low_us or 0.0) * (p.high_us or 0.0) > 0)
        causes = [p for p in sure if p.part != STALLS and sign * (p.pct or 0.0) >= MIN_CAUSE_PCT]
        return max(causes, key=lambda part: abs(part.difference_us or 0.0), default=None)


@dataclass(frozen=True)
class PartShare:
    """A part's time per output token (us), and its share of the whole time (percent).

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

    ``groups``: the shares of attention, of the products and of the host. ``clocks_pct``: what the
    clocks add to a step. ``tokens``: the output tokens of the turns with clocks; ``of_tokens_pct``:
    in percent of the measured ones.
    """

    baseline: tuple[PartShare, ...]
    groups: tuple[PartShare, ...]
    arms: tuple[ArmTime, ...]
    clocks_pct: float
    of_tokens_pct: float
    tokens: int

    @property
    def total_us(self) -> float:
        """The baseline's time per output token without stalls, in us."""
        return sum(part.us for part in self.baseline if part.part != STALLS)
