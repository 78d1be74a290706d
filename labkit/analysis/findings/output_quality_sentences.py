"""Sentences on arms' outputs: equality, quality of predictions and its change, video frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.analysis.comparison.perplexity_and_kl import ScoredWindows, scored_windows
from labkit.analysis.model.cell_model import ArmQuality
from labkit.analysis.number_format import share_pct_text, significant_text, value_text
from labkit.analysis.statistics.text_window_intervals import Interval, block_jackknife
from labkit.analysis.text_format import join_names
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellData
    from labkit.analysis.findings.cell_findings import Findings

MAX_NAMED_ARMS = 3  # if there are more arms, the closest and the furthest are given
HOLDS = {
    "bitwise": "The outputs of {arms} are bit-identical to those of {baseline}",
    "tokens": "The outputs of {arms} are token-identical to those of {baseline}",
    "noise_floor": "The outputs of {arms} differ from those of {baseline} no more often than the "
    "control's do",
    "quality": "The predictions of {arms} keep the limits of quality against {baseline}",
    "frames": "Every frame from {arms} is the one that the decoder gives at its index",
}


def outputs_wordings(findings: Findings) -> list[str]:
    """Return sentences on whether the claim about the outputs holds, the most detailed first."""
    outputs = findings.outputs
    assert outputs is not None, "the question is about outputs"
    counts = "; ".join(
        f"{arm}: {some} of {total} differ" for arm, (some, total) in outputs.differing.items()
    )
    differing = f" ({counts})" if counts else ""
    if outputs.status == "pass":
        names = {"arms": join_names(findings.arms), "baseline": findings.baseline}
        text = HOLDS[outputs.claim].format(**names)
        return [f"{text}{differing}.", f"{text}."]
    if outputs.status == "fail":
        text = "The outputs are not as claimed"
        full = f"{text} ({outputs.claim}): {outputs.reason}{differing}."
        return [full, f"{text}{differing}.", f"{text}."]
    return [f"No answer: {outputs.reason}{differing}.", "No answer."]


def quality_phrases(data: CellData) -> Mapping[str, str]:
    """Return each treatment arm's quality as a phrase; empty if the workload scores no texts."""
    arms = data.treatment_arms
    return {one.arm: quality_phrase(one) for one in data.qualities if one.arm in arms}


def quality_sentences(findings: Findings) -> list[str]:
    """Return a sentence on the quality of all treatment arms; empty if none scored texts."""
    qualities = sorted(findings.qualities, key=lambda one: one.metrics["kl_mean"].estimate)
    if not qualities:
        return []
    where = f"Quality against {findings.baseline}"
    if len(qualities) > MAX_NAMED_ARMS:
        where += f", the closest and the furthest of {len(qualities)} arms"
        qualities = [qualities[0], qualities[-1]]
    parts = [f"{quality.arm} {quality_phrase(quality)}" for quality in qualities]
    return [f"{where}: {'; '.join(parts)}."]


def quality_phrase(quality: ArmQuality) -> str:
    """Return ``KL 0.004 (0.003 to 0.005) nats, 99.10 % (98.70 to 99.50) the same next token``."""
    kl, top1 = (quality.metrics[name] for name in ("kl_mean", "top1_agreement"))
    return f"KL {interval_text(kl)} nats, {share_text(top1)} the same next token"


def interval_text(interval: Interval, digits: int = 3) -> str:
    """Write an estimate with its interval: ``0.0041 (0.0032 to 0.0052)``."""
    text = significant_text(interval.estimate, digits)
    if interval.low is None or interval.high is None:
        return text
    low, high = (significant_text(end, digits) for end in (interval.low, interval.high))
    return (
        text if interval.low == interval.estimate == interval.high else f"{text} ({low} to {high})"
    )


def share_text(interval: Interval) -> str:
    """Write a share with its interval in percent: ``99.1 % (98.7 to 99.5)``."""
    text = f"{share_pct_text(interval.estimate, 2)} %"
    if interval.low is None or interval.high is None or interval.low == interval.high:
        return text
    low, high = (share_pct_text(end, 2) for end in (interval.low, interval.high))
    return f"{text} ({low} to {high})"


def frames_sentences(findings: Findings) -> Iterator[str]:
    """Yield what the arms' frames show, a sentence each for answers, events or distances."""
    frames = findings.frames or {}
    if len(frames) < 2:
        return
    first = next(iter(frames.values()))
    if first.asked:
        right = _by_value({arm: f"{each.right:,}" for arm, each in frames.items()})
        yield f"Of {first.asked:,} questions a model answers correctly: {right}."
    if first.planted:
        shown = _by_value({arm: f"{each.visible:,}" for arm, each in frames.items()})
        yield f"Of {first.planted:,} planted events the frames show: {shown}."
    if not first.asked and not first.planted:
        far = _by_value({arm: value_text(each.distance_ms) for arm, each in frames.items()})
        yield f"Mean distance of the frames from the requested ones, in ms: {far}."


def _by_value(values: Mapping[str, str]) -> str:
    """Return ``stream and seek 67; keyframes 44``."""
    arms: dict[str, list[str]] = {}
    for arm, value in values.items():
        arms.setdefault(value, []).append(arm)
    return "; ".join(f"{join_names(names)} {value}" for value, names in arms.items())


def worth_clauses(findings: Findings, arm: str) -> Iterator[str]:
    """Yield what an arm's frames show or its predictions are worth, the most details first."""
    frames: Mapping[str, PickedFrames] = findings.frames or {}
    if arm in frames and findings.baseline in frames:
        yield _frames_clause(frames[arm], findings.baseline, frames[findings.baseline])
    for quality in findings.qualities:
        if quality.arm == arm:
            mean, top1 = (quality.metrics[name] for name in ("kl_mean", "top1_agreement"))
            kl = f"KL is {significant_text(mean.estimate, 2)} nats"
            same = f"{share_pct_text(top1.estimate, 1)} % of next tokens are the same"
            yield from (f"{kl}, {same}", kl)


def _frames_clause(own: PickedFrames, baseline: str, other: PickedFrames) -> str:
    if own.asked:
        right = f"{own.right:,} of {own.asked:,} answers are correct"
        return f"{right}, {baseline} {other.right:,}"
    if own.planted:
        shown = f"it shows {own.visible:,} of {own.planted:,} planted events"
        return f"{shown}, {baseline} {other.visible:,}"
    return f"its frames are {value_text(own.distance_ms)} ms off on average"


def quality_change_notes(old: CellData, new: CellData) -> Iterator[str]:
    """Yield a sentence for each arm that scored texts in both studies.

    If both studies scored the same windows, the change of the mean KL divergence has an interval,
    because the windows are paired.
    """
    before, after = quality_phrases(old), quality_phrases(new)
    for arm in [arm for arm in before if arm in after]:
        windows = [scored_windows(arm, data.records) for data in (old, new)]
        yield (
            f"Quality of {arm} against {old.baseline}: old {before[arm]}; new {after[arm]}; "
            f"{_kl_change(*windows)}."
        )


def _kl_change(old: ScoredWindows | None, new: ScoredWindows | None) -> str:
    assert old is not None and new is not None, "both have a quality"
    tokens = old.tokens
    if not np.array_equal(tokens, new.tokens):
        return "the windows differ, so the change has no interval"
    change = new.kl_sums - old.kl_sums
    if not change.any():
        return "the KL divergence is the same in every window"
    interval = block_jackknife(
        lambda some: float(change[some].sum() / tokens[some].sum()), len(tokens)
    )
    return f"the KL divergence changed by {interval_text(interval)} nats"


@dataclass(frozen=True)
class PickedFrames:
    """An arm's picked frames of all clips, from the arm's first successful run."""

    visible: int  # events that the frames show
    planted: int  # all events of the clips
    right: int  # questions that a model answered correctly from the frames
    asked: int  # all questions
    distance_ms: float  # mean distance of the picked frames from the requested ones


def picked_frames(data: CellData) -> dict[str, PickedFrames]:
    """Return the picked frames of the baseline and every treatment arm; empty without video."""
    arms = [data.baseline, *data.treatment_arms]
    first: dict[str, Record] = {}
    for record in data.records:
        if record.ok and any("video" in case.notes for case in record.cases):
            first.setdefault(record.arm, record)
    return {arm: _of_record(first[arm]) for arm in arms if arm in first}


def _of_record(record: Record) -> PickedFrames:
    notes = [case.notes for case in record.cases if "video" in case.notes]
    events = [kind for note in notes for kind in note.get("evidence", {}).values()]
    answers: Mapping[str, Any] = record.notes.get("answers", {})
    return PickedFrames(
        sum(kind["visible"] for kind in events),
        sum(kind["planted"] for kind in events),
        answers.get("right", 0),
        answers.get("asked", 0),
        fmean(note["video"]["distance_ms"] or 0.0 for note in notes),
    )
