"""Tables and charts of video cells: decode times, decoder work, picked frames, visible events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from labkit.analysis.document.chart import Chart
from labkit.analysis.document.report_parts import (
    CellSource,
    ChartPart,
    Parts,
    PictureFile,
    section,
    table_section,
)
from labkit.analysis.document.svg_chart_renderer import arm_classes
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Row
from labkit.analysis.number_format import value_text
from labkit.analysis.tables.published_vs_measured import published_source
from labkit.records import Record
from labkit.records.record_notes_schema import AnswersNote, EvidenceNote, VideoNote

ClipAndArm = tuple[str, str]
ClipAndEvent = tuple[str, str]
MAX_DRAWN_CLIPS = 8
ALL_EVENTS = "all events"
WORK_COUNTS = {
    "frames_decoded": "frames decoded",
    "delta_frames": "delta frames",
    "packets_read": "packets read",
    "packets_decoded": "packets decoded",
    "seeks": "seeks",
    "repeated": "picks that repeat",
}
NO_MODEL_NOTE = (
    "No model answered questions about these frames; set workload.questions to have one answer."
)
EVENTS_NOTE = (
    "A planted event is visible if the picked frames show both the state before and the state "
    "after it. This is evidence in the frames, not accuracy: no model has looked at them."
)


@dataclass(frozen=True)
class ArmPicks:
    """The frames that an arm picked from a clip, with the record's notes on the clip.

    ``evidence`` says which planted events the picked frames show.
    """

    picks: Sequence[int]
    notes: VideoNote
    evidence: Mapping[str, EvidenceNote]


# Every arm's picks, by clip and then by arm, in the order of the records.
Clips = Mapping[str, Mapping[str, ArmPicks]]


def _facts(clips: Clips, clip: str) -> VideoNote:
    """Return the facts of a clip that are equal for all arms: frames, keyframes, seconds."""
    return next(iter(clips[clip].values())).notes


def clip_records(cell: Cell, records: Sequence[Record]) -> Clips:
    """Return the picks of every arm except the control, from the arm's first successful run."""
    by_clip: dict[str, dict[str, ArmPicks]] = {}
    arms = cell.real_arms
    for record in records:
        for case in record.cases if record.ok and record.arm in arms else ():
            if "video" in case.known_notes and case.outputs is not None:
                notes = case.known_notes
                evidence = notes.get("evidence", {})
                picks = ArmPicks(case.outputs["picks"], notes["video"], evidence)
                by_clip.setdefault(case.case, {}).setdefault(record.arm, picks)
    return by_clip


def decode_times_table(cell: Cell, records: Sequence[Record]) -> Table[Row]:
    """Return every arm's decode time by clip, with the published time beside it."""
    clips = clip_records(cell, records)
    rows = [r for r in cell.rows if r.metric == "decode_ms" and r.case in clips]
    published = {row.case: row.arms for row in cell.published_rows}
    columns = [
        Column[Row]("clip", lambda row: row.case, numeric=False),
        Column("frames", lambda row: _facts(clips, row.case)["frames"], "{:,}".format),
        Column("keyframes", lambda row: _facts(clips, row.case)["keyframes"], "{:,}".format),
    ]
    for arm in cell.real_arms:
        columns.append(Column(f"{arm} (ms)", partial(Row.median, arm=arm), value_text))
        times = {case: arms[arm] for case, arms in published.items() if arm in arms}
        if times:
            columns.append(Column(f"published: {arm} (ms)", _published_time(times)))
    notes = (
        "One request: open, pick, decode, convert. Medians over runs.",
        *_throughput_notes(cell),
    )
    return Table(tuple(columns), tuple(rows), (*notes, published_source(cell) or ""))


def _published_time(times: Mapping[str, float]) -> Callable[[Row], str]:
    return lambda row: f"{times[row.case]:,}" if row.case in times else ""


def _throughput_notes(cell: Cell) -> Iterator[str]:
    row = next((r for r in cell.rows if r.metric == "request_s"), None)
    if row is not None:
        medians = ((arm, row.median(arm)) for arm in cell.real_arms)
        rates = ", ".join(f"{arm} {value_text(median)}" for arm, median in medians)
        yield f"Requests per second of a job that decodes several clips at a time: {rates}."


def clip_work_table(cell: Cell, records: Sequence[Record]) -> Table[ClipAndArm]:
    """Return the demuxer's and decoder's counts per request, by clip and arm.

    The table also has the distances from the requested frames to the picked frames.
    """
    clips = clip_records(cell, records)
    columns = [
        Column[ClipAndArm]("clip", lambda key: key[0], numeric=False),
        Column("arm", lambda key: key[1], numeric=False),
        *(_notes_column(clips, key, heading) for key, heading in WORK_COUNTS.items()),
        _notes_column(clips, "distance_frames", "distance, mean (frames)", value_text),
        _notes_column(clips, "most_frames", "at most (frames)"),
        _notes_column(clips, "distance_ms", "mean (ms)", value_text),
        _notes_column(clips, "most_ms", "at most (ms)", value_text),
    ]
    lines = [(clip, arm) for clip, arms in clips.items() for arm in cell.real_arms if arm in arms]
    note = (
        "Per request, counted at the demuxer and the decoder; OpenCV does not report its packets. "
        "Distance: from a picked frame to the requested one."
    )
    return Table(tuple(columns), tuple(lines), (note,))


def _notes_column(
    clips: Clips, key: str, heading: str, formatter: Callable[[Any], str] = "{:,}".format
) -> Column[ClipAndArm]:
    def value(line: ClipAndArm) -> object:
        notes: Mapping[str, object] = clips[line[0]][line[1]].notes
        return notes[key]

    return Column(heading, value, lambda value: "–" if value is None else formatter(value))


def visible_events_table(cell: Cell, records: Sequence[Record]) -> Table[ClipAndEvent] | None:
    """Return the share of planted events that every arm's picks show, by kind and clip."""
    clips = clip_records(cell, records)
    kinds = [k for arms in clips.values() for picks in arms.values() for k in picks.evidence]
    if not kinds:
        return None
    kinds = list(dict.fromkeys([*kinds, ALL_EVENTS]))
    lines = [("all rows", kind) for kind in kinds]
    lines += [(clip, kind) for clip in clips for kind in kinds]
    columns = [
        Column[ClipAndEvent]("clip", lambda line: line[0], numeric=False),
        Column("event", lambda line: line[1], numeric=False),
        *(Column(arm, _visible_share(clips, arm)) for arm in cell.real_arms),
    ]
    answered = any("answers" in record.known_notes for record in records)
    notes = (EVENTS_NOTE,) if answered else (EVENTS_NOTE, NO_MODEL_NOTE)
    return Table(tuple(columns), tuple(lines), notes)


def _visible_share(clips: Clips, arm: str) -> Callable[[ClipAndEvent], str]:
    def value(line: ClipAndEvent) -> str:
        clip, kind = line
        own = [clips[name].get(arm) for name in ([clip] if clip in clips else clips)]
        known = [pair for picks in own if picks is not None for pair in picks.evidence.items()]
        counts = [counts for key, counts in known if kind in (key, ALL_EVENTS)]
        planted = sum(c["planted"] for c in counts)
        if not planted:
            return ""
        visible = sum(c["visible"] for c in counts)
        return f"{visible} of {planted} ({visible / planted:.0%})"

    return value


def answers_table(cell: Cell, records: Sequence[Record]) -> Table[str]:
    """Return the number of questions that a model answered correctly from every arm's frames."""
    answers: dict[str, AnswersNote] = {}
    for record in records:
        if record.ok and "answers" in record.known_notes:
            answers.setdefault(record.arm, record.known_notes["answers"])

    def share(arm: str) -> float:
        return float(answers[arm]["right"] / max(1, answers[arm]["asked"]))

    columns: tuple[Column[str], ...] = (
        Column("arm", str, numeric=False),
        Column("asked", lambda arm: answers[arm]["asked"], "{:,}".format),
        Column("correct", lambda arm: answers[arm]["right"], "{:,}".format),
        Column("share", share, "{:.1%}".format),
    )
    return Table(columns, tuple(arm for arm in cell.real_arms if arm in answers))


def _frame_time_s(facts: VideoNote, frame: int) -> float:
    """Return the presentation time of a frame (seconds), assuming a constant frame rate."""
    seconds, last = float(facts["seconds"]), max(1, int(facts["frames"]) - 1)
    return seconds * frame / last


def keyframe_indices(facts: VideoNote) -> Iterator[int]:
    """Yield the indices of a clip's keyframes. Records store ranges: [first, step, count]."""
    for first, step, count in facts["keyframe_places"] or ():
        yield from (first + step * i for i in range(count))


def picks_charts(cell: Cell, clips: Clips) -> Iterator[tuple[str, Chart]]:
    """Yield a chart of keyframes and picked frames of the first few clips with known keyframes."""
    known = [clip for clip in clips if _facts(clips, clip)["keyframe_places"] is not None]
    for clip in known[:MAX_DRAWN_CLIPS]:
        facts, arms = _facts(clips, clip), clips[clip]
        rows = [arm for arm in cell.real_arms if arm in arms]
        end = float(facts["seconds"]) or 1.0
        chart = Chart(
            title=f"frames picked of {clip}",
            x=(-0.01 * end, 1.01 * end),
            y=(-1.0, float(len(rows))),
            x_label="seconds from the first frame",
            rows=(*rows, "the clip's keyframes"),
        )
        for frame in keyframe_indices(facts):
            at = _frame_time_s(facts, frame)
            chart.line([(at, -0.85), (at, -0.15)], "line control")
        styles = arm_classes(cell)
        for index, arm in enumerate(rows):
            y = len(rows) - index - 0.5
            style, mark = styles[arm]
            for frame, copies in sorted(Counter(arms[arm].picks).items()):
                at = _frame_time_s(facts, frame)
                times = f", {copies} times" if copies > 1 else ""
                chart.dot(at, y, style, mark, f"{arm}: frame {frame}{times}", arm=arm)
                if copies > 1:
                    chart.text(at, y, f"×{copies}", dx=7, dy=-5)
        yield clip, chart


@section("Picked frames")
def _picked_frames_section(report: CellSource) -> Parts:
    """Show which frames every arm picks."""
    clips = clip_records(report.cell, report.records)
    charts = [
        ChartPart(chart, f"{clip}; the number of copies of frames that are picked more than once")
        for clip, chart in picks_charts(report.cell, clips)
    ]
    picture = PictureFile(report.cell.stem("picks"), "Picked frames", charts)
    return [*charts, picture] if charts else []


VIDEO_SECTIONS = (
    table_section("Decode times by clip", decode_times_table),
    table_section("Decoding work per request", clip_work_table),
    _picked_frames_section,
    table_section("Visible events", visible_events_table, answers_table),
)
