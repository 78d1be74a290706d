"""The quality of arms that score texts, in words: for the headline and beside each verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from labkit.analysis.comparison.text_quality import TextQuality, text_qualities
from labkit.analysis.number_format import significant_text
from labkit.analysis.statistics.block_jackknife import Interval

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellData

MAX_NAMED_ARMS = 3  # if there are more arms, the closest and the furthest are given


def quality_phrases(data: CellData) -> Mapping[str, str]:
    """Return each treatment arm's quality as a phrase; empty if the workload scores no texts."""
    return {quality.arm: quality_phrase(quality) for quality in _treatments(data)}


def quality_sentences(data: CellData) -> list[str]:
    """Return a sentence on the quality of all treatment arms; empty if none scored texts."""
    qualities = sorted(_treatments(data), key=lambda quality: quality.kl_mean.estimate)
    if not qualities:
        return []
    where = f"Quality against {data.baseline}"
    if len(qualities) > MAX_NAMED_ARMS:
        where += f", the closest and the furthest of {len(qualities)} arms"
        qualities = [qualities[0], qualities[-1]]
    parts = [f"{quality.arm} {quality_phrase(quality)}" for quality in qualities]
    return [f"{where}: {'; '.join(parts)}."]


def quality_clauses(data: CellData, arm: str) -> list[str]:
    """Return an arm's quality for a short answer, the longest first; empty if it scored no texts.

    ``KL is 0.0041 nats, 99.1 % of next tokens are the same``.
    """
    for quality in _treatments(data):
        if quality.arm == arm:
            kl = f"KL is {significant_text(quality.kl_mean.estimate, 2)} nats"
            same = f"{100 * quality.top1_agreement.estimate:.1f} % of next tokens are the same"
            return [f"{kl}, {same}", kl]
    return []


def quality_phrase(quality: TextQuality) -> str:
    """Return ``KL 0.004 (0.003 to 0.005) nats, 99.10 % (98.70 to 99.50) the same next token``."""
    kl, top1 = interval_text(quality.kl_mean), share_text(quality.top1_agreement)
    return f"KL {kl} nats, {top1} the same next token"


def _treatments(data: CellData) -> list[TextQuality]:
    arms = data.treatment_arms
    qualities = text_qualities([data.baseline, *arms], data.records)
    return [quality for quality in qualities if quality.arm in arms]


def interval_text(interval: Interval, digits: int = 3) -> str:
    """Write an estimate with its interval: ``0.0041 (0.0032 to 0.0052)``."""
    if interval.low is None or interval.high is None:
        return significant_text(interval.estimate, digits)
    if interval.low == interval.estimate == interval.high:
        return significant_text(interval.estimate, digits)
    low, high = (significant_text(end, digits) for end in (interval.low, interval.high))
    return f"{significant_text(interval.estimate, digits)} ({low} to {high})"


def share_text(interval: Interval) -> str:
    """Write a share with its interval in percent: ``99.1 % (98.7 to 99.5)``."""
    text = f"{100 * interval.estimate:.2f} %"
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return text
    return f"{text} ({100 * interval.low:.2f} to {100 * interval.high:.2f})"
