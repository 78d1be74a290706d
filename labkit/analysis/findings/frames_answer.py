"""What an arm's picked video frames show, in words: the other half of a faster loader's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from labkit.analysis.number_format import join_names, value_text
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.analysis.comparison.cell_analysis import CellData


@dataclass(frozen=True)
class PickedFrames:
    """An arm's picked frames of all clips, from the arm's first successful run.

    Parameters
    ----------
    visible, planted
        Events that the frames show, and all events of the clips; 0 if none were planted.
    right, asked
        Questions that a model answered correctly from the frames, and all; 0 if none were asked.
    distance_ms
        Mean distance of the picked frames from the requested ones.
    """

    visible: int
    planted: int
    right: int
    asked: int
    distance_ms: float


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


def frames_sentences(data: CellData) -> list[str]:
    """Return what the arms' frames show, a sentence each for answers, events or distances."""
    frames = picked_frames(data)
    if len(frames) < 2:
        return []
    first, sentences = next(iter(frames.values())), []
    if first.asked:
        right = _by_value({arm: f"{each.right:,}" for arm, each in frames.items()})
        sentences.append(f"Of {first.asked:,} questions a model answers correctly: {right}.")
    if first.planted:
        shown = _by_value({arm: f"{each.visible:,}" for arm, each in frames.items()})
        sentences.append(f"Of {first.planted:,} planted events the frames show: {shown}.")
    if not sentences:
        far = _by_value({arm: value_text(each.distance_ms) for arm, each in frames.items()})
        sentences.append(f"Mean distance of the frames from the requested ones, in ms: {far}.")
    return sentences


def _by_value(values: Mapping[str, str]) -> str:
    """Return ``stream and seek 67; keyframes 44``."""
    arms: dict[str, list[str]] = {}
    for arm, value in values.items():
        arms.setdefault(value, []).append(arm)
    return "; ".join(f"{join_names(names)} {value}" for value, names in arms.items())


def frames_clauses(data: CellData, arm: str) -> Sequence[str]:
    """Return what an arm's frames show beside the baseline's, in a few words; the best first."""
    frames = picked_frames(data)
    own, baseline = frames.get(arm), frames.get(data.baseline)
    if own is None or baseline is None:
        return []
    if own.asked:
        right = f"{own.right:,} of {own.asked:,} answers are correct"
        return [f"{right}, {data.baseline} {baseline.right:,}"]
    if own.planted:
        shown = f"it shows {own.visible:,} of {own.planted:,} planted events"
        return [f"{shown}, {data.baseline} {baseline.visible:,}"]
    return [f"its frames are {value_text(own.distance_ms)} ms off on average"]
