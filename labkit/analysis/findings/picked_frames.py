"""What an arm's picked video frames show: events, answers, and distances from requested frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

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
