"""The quality of every arm of a scoring workload, compared with the baseline, with intervals.

Each window of text is one sample, because the positions of one window are not independent.
Neighbouring windows of a text may depend on each other too (``statistics.block_jackknife``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.model.cell_model import ArmQuality, QualityInterval
from labkit.analysis.number_format import round_significant, significant_text
from labkit.analysis.statistics.block_jackknife import (
    CONFIDENCE,
    Indices,
    Interval,
    block_jackknife,
    positive_interval,
    quantile_interval,
)
from labkit.records import Record
from labkit.records.kl_histogram import decode_histogram
from labkit.records.record_notes import ScoringNote

KL_QUANTILES = (0.5, 0.9, 0.99, 0.999)
INTERVAL_KEYS = ("estimate", "low", "high")
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ScoredWindows:
    """The scores of one run, for each window; all but ``kl`` are float64 [windows].

    ``tokens`` is the number of predicted tokens, and ``nll`` the sum of their negative log
    likelihoods in nats. ``same_top1`` is the number of positions whose likeliest token is that of
    the baseline. ``change_squared`` is the sum of squared differences from the baseline in the
    probability of the text's next token. ``kl`` holds each window's KL divergences from the
    baseline in nats, rounded as in ``labkit.records.kl_histogram`` and in no order of positions.
    ``kl_sums`` holds their sums, which are not rounded.
    """

    tokens: Floats
    nll: Floats
    same_top1: Floats
    change_squared: Floats
    kl: Sequence[Floats]
    kl_sums: Floats

    @classmethod
    def from_notes(cls, windows: Sequence[Mapping[str, Any]]) -> ScoredWindows:
        """Return the windows of a record's ``notes["scoring"]["windows"]``.

        Older records have a list ``kl``, the divergence at each position rounded to four digits, in
        place of ``kl_sum`` and ``kl_histogram``.
        """

        def column(key: str) -> Floats:
            return np.array([window[key] for window in windows], np.float64)

        kl = [_divergences(window) for window in windows]
        sums = [w.get("kl_sum", values.sum()) for w, values in zip(windows, kl, strict=True)]
        return cls(
            column("tokens"),
            column("nll"),
            column("same_top1"),
            column("probability_change_squared"),
            kl,
            np.array(sums, np.float64),
        )


def _divergences(window: Mapping[str, Any]) -> Floats:
    """Return the KL divergences of a window in a record, float64 [tokens]."""
    if "kl" in window:
        return np.array(window["kl"], np.float64)
    return decode_histogram(window["kl_histogram"])


@dataclass(frozen=True)
class TextQuality:
    """An arm's quality over all windows."""

    arm: str
    # windows, tokens: the numbers of windows and of predicted tokens.
    windows: int
    tokens: int
    perplexity: Interval  # exp of the mean negative log likelihood per token
    perplexity_ratio: Interval  # the arm's perplexity divided by the baseline's on the same tokens
    # kl_mean, kl_quantiles: KL divergence from the baseline per position, in nats: its mean, and
    # the quantiles in the order of ``KL_QUANTILES``. The quantiles are within .05 % of the exact
    # ones (``labkit.records.kl_histogram.RELATIVE_ERROR``).
    kl_mean: Interval
    kl_quantiles: tuple[Interval, ...]
    top1_agreement: Interval  # share of positions whose likeliest token is that of the baseline
    # Root mean square difference from the baseline in the probability of the text's next token.
    probability_change: Interval
    # The positions with the largest KL divergence, as in the record.
    worst: Sequence[Mapping[str, Any]]

    def rounded(self) -> ArmQuality:
        """Return the arm's part of the model: each metric with its interval."""
        shares = (f"kl_p{100 * share:g}".replace(".", "_") for share in KL_QUANTILES)
        metrics = {
            "perplexity": self.perplexity,
            "perplexity_ratio": self.perplexity_ratio,
            "kl_mean": self.kl_mean,
            **dict(zip(shares, self.kl_quantiles, strict=True)),
            "top1_agreement": self.top1_agreement,
            "probability_change": self.probability_change,
        }
        return ArmQuality(
            self.arm,
            self.windows,
            self.tokens,
            {
                name: QualityInterval(*(round_significant(getattr(x, k)) for k in INTERVAL_KEYS))
                for name, x in metrics.items()
            },
        )


def text_qualities(
    arms: Sequence[str], records: Sequence[Record], confidence: float = CONFIDENCE
) -> list[TextQuality]:
    """Return the quality of each arm that scored texts; the first arm is the baseline.

    Only each arm's first successful run is used, because the texts are the same in every run.
    ``confidence``: that of the intervals; see ``Design.quality_confidence``.
    """
    notes = {arm: _first_notes(arm, records) for arm in arms}
    reference = scored_windows(arms[0], records) if arms else None
    if reference is None:
        return []
    return [
        text_quality(arm, found, reference, confidence) for arm, found in notes.items() if found
    ]


def scored_windows(arm: str, records: Sequence[Record]) -> ScoredWindows | None:
    """Return the windows that an arm's first successful run scored, or None if it has none."""
    notes = _first_notes(arm, records)
    return None if notes is None else ScoredWindows.from_notes(notes["windows"])


def _first_notes(arm: str, records: Sequence[Record]) -> ScoringNote | None:
    for record in records:
        if record.ok and record.arm == arm:
            for case in record.cases:
                if "scoring" in case.known_notes:
                    notes = case.known_notes["scoring"]
                    return notes
    return None


def text_quality(
    arm: str, notes: ScoringNote, baseline: ScoredWindows, confidence: float = CONFIDENCE
) -> TextQuality:
    """Return an arm's quality from its record's notes, compared with the baseline's windows."""
    scored = ScoredWindows.from_notes(notes["windows"])
    count, tokens = len(scored.tokens), scored.tokens

    def mean(sums: Floats) -> Callable[[Indices], float]:
        return lambda windows: float(sums[windows].sum() / tokens[windows].sum())

    agreement = block_jackknife(mean(scored.same_top1), count, confidence)
    return TextQuality(
        arm,
        count,
        int(tokens.sum()),
        block_jackknife(mean(scored.nll), count, confidence).transformed(math.exp),
        block_jackknife(mean(scored.nll - baseline.nll), count, confidence).transformed(math.exp),
        positive_interval(mean(scored.kl_sums), count, confidence),
        tuple(quantile_interval(scored.kl, share, confidence) for share in KL_QUANTILES),
        agreement.transformed(lambda share: min(max(share, 0.0), 1.0)),
        positive_interval(mean(scored.change_squared), count, confidence).transformed(math.sqrt),
        notes["worst"],
    )


@dataclass(frozen=True)
class QualityMetric:
    """A metric that can have a limit: the largest value allowed if ``is_upper``, else the least."""

    value: Callable[[TextQuality], Interval]
    is_upper: bool


QUALITY_METRICS: Mapping[str, QualityMetric] = {
    "kl_mean": QualityMetric(lambda quality: quality.kl_mean, True),
    "perplexity_ratio": QualityMetric(lambda quality: quality.perplexity_ratio, True),
    "top1_agreement": QualityMetric(lambda quality: quality.top1_agreement, False),
}


def limit_fields(quality: ArmQuality | None) -> dict[str, float | None]:
    """Return an arm's quality as flat fields: ``kl_mean``, ``kl_mean_low``, ``kl_mean_high``, ...

    If ``quality`` is None, every field is None.
    """
    return {
        name + suffix: None if quality is None else getattr(quality.metrics[name], key)
        for name in QUALITY_METRICS
        for key, suffix in zip(INTERVAL_KEYS, ("", "_low", "_high"), strict=True)
    }


def broken_limits(quality: TextQuality, limits: Mapping[str, float]) -> Iterator[str]:
    """Yield a phrase for each limit that the arm breaks, or that its interval leaves undecided."""
    for name, limit in limits.items():
        metric = QUALITY_METRICS[name]
        interval = metric.value(quality)
        bound = f"{'at most' if metric.is_upper else 'at least'} {limit:g}"
        if interval.low is None or interval.high is None:
            yield f"{name} is not decided: too few windows for an interval"
            continue
        extent = (
            f"{significant_text(interval.estimate, 4)} ({significant_text(interval.low, 4)} to "
            f"{significant_text(interval.high, 4)})"
        )
        inside, outside = interval.high <= limit, interval.low > limit
        if not metric.is_upper:
            inside, outside = interval.low >= limit, interval.high < limit
        if outside:
            yield f"{name} is {extent}, and must be {bound}"
        elif not inside:
            yield f"{name} is not decided: {extent} reaches across {bound}; score more windows"


def limits_decided(
    arms: Sequence[str], records: Sequence[Record], limits: Mapping[str, float], confidence: float
) -> bool:
    """Return whether every arm's intervals lie within the limits or outside them."""
    qualities = text_qualities(arms, records, confidence)
    decided = {one.arm: not _undecided(one, limits) for one in qualities}
    return all(decided.get(arm, False) for arm in arms)


def _undecided(quality: TextQuality, limits: Mapping[str, float]) -> bool:
    intervals = (QUALITY_METRICS[name].value(quality) for name in limits)
    return any(
        one.low is None or one.high is None or (one.low < limit < one.high)
        for one, limit in zip(intervals, limits.values(), strict=True)
    )
