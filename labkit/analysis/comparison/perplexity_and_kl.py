"""Perplexity, KL divergence and top-1 agreement of scored arms against the baseline.

In their intervals, each window of text is one sample, because the positions of one window are not
independent. Neighbouring windows of a text may depend on each other too
(``statistics.block_jackknife``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.analysis.model.cell_model import ArmQuality
from labkit.analysis.number_format import round_digits, significant_text
from labkit.analysis.statistics.text_window_intervals import (
    CONFIDENCE,
    Indices,
    Interval,
    block_jackknife,
    positive_interval,
    quantile_interval,
)
from labkit.records import Record, RecordError
from labkit.records.kl_histogram import decode_histogram
from labkit.records.record_notes_schema import ScoringNote

# Metrics that are quantiles of the KL divergence over positions, and their shares.
KL_QUANTILES = {"kl_p50": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p99_9": 0.999}
# The metrics that can have a limit, and whether it is the largest value allowed or the least.
IS_UPPER_LIMIT = {"kl_mean": True, "perplexity_ratio": True, "top1_agreement": False}
# The largest mean probability of the tokens compared as one, for a KL divergence to keep a limit.
# With .8 % that of 4-bit weights was 1.3 % too small; with more it is a mere lower bound.
MAX_REST = 0.01
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
        keys = ("tokens", "nll", "same_top1", "probability_change_squared")
        tokens, nll, same_top1, change = (
            np.array([window[key] for window in windows], np.float64) for key in keys
        )
        kl = [_divergences(window) for window in windows]
        sums = [w.get("kl_sum", values.sum()) for w, values in zip(windows, kl, strict=True)]
        return cls(tokens, nll, same_top1, change, kl, np.array(sums, np.float64))


def _divergences(window: Mapping[str, Any]) -> Floats:
    if "kl" in window:
        return np.array(window["kl"], np.float64)
    try:
        return decode_histogram(window["kl_histogram"], int(window["tokens"]))
    except ValueError as error:
        raise RecordError(f"window {window.get('window')}: {error}") from None


def text_qualities(
    arms: Sequence[str], records: Sequence[Record], confidence: float = CONFIDENCE
) -> list[ArmQuality]:
    """Return the quality of each arm that scored texts; the first arm is the baseline.

    Only each arm's first successful run is used, because the texts are the same in every run.
    ``confidence``: that of the intervals; see ``Design.quality_confidence``.
    """
    scored = {arm: scored_windows(arm, records) for arm in arms}
    reference = scored[arms[0]] if arms else None
    if reference is None:
        return []
    return [
        _arm_quality(arm, windows, reference, confidence)
        for arm, windows in scored.items()
        if windows is not None
    ]


def scored_windows(arm: str, records: Sequence[Record]) -> ScoredWindows | None:
    """Return the windows that an arm's first successful run scored, or None if it has none."""
    notes = scoring_note(arm, records)
    return None if notes is None else ScoredWindows.from_notes(notes["windows"])


def scoring_note(arm: str, records: Sequence[Record]) -> ScoringNote | None:
    """Return what an arm's first successful run noted of the texts, or None if it scored none."""
    cases = (case for record in records if record.ok and record.arm == arm for case in record.cases)
    return next((c.known_notes["scoring"] for c in cases if "scoring" in c.known_notes), None)


def _arm_quality(
    arm: str, scored: ScoredWindows, baseline: ScoredWindows, confidence: float
) -> ArmQuality:
    count, tokens = len(scored.tokens), scored.tokens

    def mean(sums: Floats) -> Callable[[Indices], float]:
        return lambda windows: float(sums[windows].sum() / tokens[windows].sum())

    def perplexity(nll: Floats) -> Interval:
        return block_jackknife(mean(nll), count, confidence).transformed(math.exp)

    agreement = block_jackknife(mean(scored.same_top1), count, confidence)
    change = positive_interval(mean(scored.change_squared), count, confidence)
    metrics = {
        "perplexity": perplexity(scored.nll),
        "perplexity_ratio": perplexity(scored.nll - baseline.nll),
        "kl_mean": positive_interval(mean(scored.kl_sums), count, confidence),
        **{
            name: quantile_interval(scored.kl, share, confidence)
            for name, share in KL_QUANTILES.items()
        },
        "top1_agreement": agreement.transformed(lambda share: min(max(share, 0.0), 1.0)),
        "probability_change": change.transformed(math.sqrt),
    }
    rounded = {name: one.transformed(round_digits) for name, one in metrics.items()}
    return ArmQuality(arm, count, int(tokens.sum()), rounded)


def limit_fields(quality: ArmQuality | None) -> dict[str, float | None]:
    """Return a quality as flat fields: ``kl_mean``, ``kl_mean_low``, ...; None: each is None."""
    return {
        name + suffix: None if quality is None else getattr(quality.metrics[name], key)
        for name in IS_UPPER_LIMIT
        for key, suffix in zip(INTERVAL_KEYS, ("", "_low", "_high"), strict=True)
    }


def kl_is_bound(arm: str, baseline: str, records: Sequence[Record]) -> bool:
    """Return whether an arm's KL divergence is a mere lower bound, and may be much larger.

    The rest of a server's likeliest tokens is not recorded, and is larger than the baseline's.
    """
    note, reference = scoring_note(arm, records), scoring_note(baseline, records)
    if note is None or reference is None:
        return False
    compares_fewer = note["reference_top"] < reference["reference_top"]
    return compares_fewer or note["reference_rest"] > MAX_REST


def broken_limits(
    quality: ArmQuality, limits: Mapping[str, float], *, is_bound: bool = False
) -> Iterator[str]:
    """Yield a phrase for each limit that the arm breaks, or that its interval leaves undecided.

    ``is_bound``: see ``kl_is_bound``. Such a KL divergence can break a limit and never keep it,
    unless it is 0: the arm predicts what the baseline does.
    """
    for name, limit in limits.items():
        interval = quality.metrics[name]
        bound = f"{'at most' if IS_UPPER_LIMIT[name] else 'at least'} {limit:g}"
        if interval.low is None or interval.high is None:
            yield f"{name} is not decided: too few windows for an interval"
            continue
        numbers = (interval.estimate, interval.low, interval.high)
        extent = "{} ({} to {})".format(*(significant_text(number, 4) for number in numbers))
        inside, outside = _sides(name, interval, limit)
        if outside:
            yield f"{name} is {extent}, and must be {bound}"
        elif name == "kl_mean" and is_bound and interval.high > 0:
            yield (
                f"{name} is not decided: {extent} is a lower bound from the likeliest tokens only, "
                f"which cannot show that it is {bound}; set a limit of perplexity_ratio or "
                "top1_agreement instead"
            )
        elif not inside:
            yield f"{name} is not decided: {extent} reaches across {bound}; score more windows"


def _sides(name: str, interval: Interval, limit: float) -> tuple[bool, bool]:
    """Return whether an interval lies within its metric's limit, and whether outside of it."""
    low, high = interval.low, interval.high
    if low is None or high is None:
        return False, False
    return (high <= limit, low > limit) if IS_UPPER_LIMIT[name] else (low >= limit, high < limit)


def limits_decided(
    arms: Sequence[str], records: Sequence[Record], limits: Mapping[str, float], confidence: float
) -> bool:
    """Return whether every arm's intervals lie within the limits or outside them."""
    decided = {
        one.arm
        for one in text_qualities(arms, records, confidence)
        if all(any(_sides(name, one.metrics[name], limit)) for name, limit in limits.items())
    }
    return decided.issuperset(arms)
