"""Tables and the picture of video cells: decode times, the work, what the picks show, the picks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.number_format import slug, value_text
from labkit.analysis.rendering.arm_styles import arm_classes, arm_styles
from labkit.analysis.rendering.published_table import published_source
from labkit.analysis.rendering.svg_elements import SvgChart
from labkit.analysis.rendering.tables import Column, Table
from labkit.analysis.verdict_sentences import real_arms
from labkit.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
MOST_DRAWN = 8  # clips in the picture
COUNTS = {
    "frames_decoded": "frames decoded",
    "delta_frames": "delta frames",
    "packets_read": "packets read",
    "packets_decoded": "packets decoded",
    "seeks": "seeks",
    "repeated": "picks that repeat",
}
NOT_RUN = "No model answered questions about these frames: not run here (workload.questions)."
MEANING = (
    "Of the planted events those of which the picked frames show both what was before and what "
    "came after. Evidence in the pictures, never accuracy: no model has looked at them."
)


@dataclass(frozen=True)
class Seen:
    """An arm at a clip: its picks, what is noted of them, and which planted events they show."""

    picks: Sequence[int]
    noted: Json
    evidence: Json


@dataclass(frozen=True)
class Videos:
    """What the records of a cell say of its clips: by clip and arm, in the records' order."""

    clips: Mapping[str, Mapping[str, Seen]]

    def facts(self, clip: str) -> Json:
        """Return what is the clip's own: frames, keyframes, seconds."""
        return next(iter(self.clips[clip].values())).noted


def videos(cell: Json, records: Sequence[Record]) -> Videos | None:
    """Read the first good run of every arm but the control; None where no run is of clips."""
    found: dict[str, dict[str, Seen]] = {}
    arms = real_arms(cell)
    for record in records:
        for case in record.cases if record.ok and record.arm in arms else ():
            if "video" in case.notes and case.outputs is not None:
                seen = Seen(
                    case.outputs["picks"], case.notes["video"], case.notes.get("evidence", {})
                )
                found.setdefault(case.case, {}).setdefault(record.arm, seen)
    return Videos(found) if found else None


def decode_table(cell: Json, found: Videos | None) -> Table[Json] | None:
    """Lay out every arm's decode time by clip, and what was published of it beside it."""
    if found is None:
        return None
    rows = [r for r in cell["rows"] if r["metric"] == "decode_ms" and r["case"] in found.clips]
    published = _published(cell)
    columns = [
        Column[Json]("clip", lambda row: row["case"], number=False),
        Column("frames", lambda row: found.facts(row["case"])["frames"], "{:,}".format),
        Column("keyframes", lambda row: found.facts(row["case"])["keyframes"], "{:,}".format),
    ]
    for arm in real_arms(cell):
        columns.append(Column(f"{arm} (ms)", _median(arm), value_text))
        theirs = {case: arms[arm] for case, arms in published.items() if arm in arms}
        if theirs:
            columns.append(Column(f"published: {arm} (ms)", _theirs(theirs)))
    notes = ["One request: open, pick, decode, convert. Medians over runs.", *_job(cell)]
    return Table(tuple(columns), tuple(rows), (*notes, published_source(cell) or ""))


def _published(cell: Json) -> dict[str, Json]:
    published = cell["published"]
    given = published.get("rows") or [] if isinstance(published, Mapping) else []
    return {row["case"]: row.get("arms") or {} for row in given}


def _median(arm: str) -> Callable[[Json], float | None]:
    def value(row: Json) -> float | None:
        median: float | None = row["arms"][arm]["median"]
        return median

    return value


def _theirs(given: Mapping[str, float]) -> Callable[[Json], str]:
    return lambda row: f"{given[row['case']]:,}" if row["case"] in given else ""


def _job(cell: Json) -> Iterator[str]:
    """Say every arm's requests per second."""
    row = next((r for r in cell["rows"] if r["metric"] == "request_s"), None)
    if row is not None:
        each = ((arm, row["arms"][arm]["median"]) for arm in real_arms(cell))
        said = ", ".join(f"{arm} {value_text(median)}" for arm, median in each)
        yield f"Requests per second of a job of several clips at a time: {said}."


def work_table(cell: Json, found: Videos | None) -> Table[tuple[str, str]] | None:
    """Lay out what a request of every arm read and decoded, and how far off its picks lie."""
    if found is None:
        return None
    columns = [
        Column[tuple[str, str]]("clip", lambda place: place[0], number=False),
        Column("arm", lambda place: place[1], number=False),
        *(_noted(found, key, heading) for key, heading in COUNTS.items()),
        _noted(found, "distance_frames", "distance, mean (frames)", value_text),
        _noted(found, "most_frames", "at most (frames)"),
        _noted(found, "distance_ms", "mean (ms)", value_text),
        _noted(found, "most_ms", "at most (ms)", value_text),
    ]
    places = [
        (clip, arm) for clip, arms in found.clips.items() for arm in real_arms(cell) if arm in arms
    ]
    note = (
        "Per request, counted where the demuxer and the decoder answer; OpenCV does not tell its "
        "packets. Distance: of a pick from the frame that was wished for."
    )
    return Table(tuple(columns), tuple(places), (note,))


def _noted(
    found: Videos, key: str, heading: str, form: Callable[[Any], str] = "{:,}".format
) -> Column[tuple[str, str]]:
    return Column(
        heading,
        lambda place: found.clips[place[0]][place[1]].noted[key],
        lambda value: "–" if value is None else form(value),
    )


def evidence_table(
    cell: Json, found: Videos | None, records: Sequence[Record]
) -> Table[tuple[str, str]] | None:
    """Lay out which share of the planted events every arm's picks show, by kind and by clip."""
    if found is None or not any(s.evidence for arms in found.clips.values() for s in arms.values()):
        return None
    kinds = dict.fromkeys(
        k for arms in found.clips.values() for s in arms.values() for k in s.evidence
    )
    lines = [("all rows", kind) for kind in kinds]
    lines += [(clip, kind) for clip in found.clips for kind in kinds]
    columns = [
        Column[tuple[str, str]]("clip", lambda line: line[0], number=False),
        Column("event", lambda line: line[1], number=False),
        *(Column(arm, _visible(found, arm)) for arm in real_arms(cell)),
    ]
    answered = any("answers" in record.notes for record in records)
    return Table(tuple(columns), tuple(lines), (MEANING, *([] if answered else [NOT_RUN])))


def _visible(found: Videos, arm: str) -> Callable[[tuple[str, str]], str]:
    def value(line: tuple[str, str]) -> str:
        clip, kind = line
        clips = [clip] if clip in found.clips else list(found.clips)
        counted = [
            seen.evidence[kind]
            for name in clips
            if (seen := found.clips[name].get(arm)) is not None and kind in seen.evidence
        ]
        planted = sum(c["planted"] for c in counted)
        if not planted:
            return ""
        visible = sum(c["visible"] for c in counted)
        return f"{visible} of {planted} ({visible / planted:.0%})"

    return value


def answers_table(cell: Json, records: Sequence[Record]) -> Table[str] | None:
    """Lay out how many questions a model answered rightly from every arm's frames."""
    found: dict[str, Json] = {}
    for record in records:
        if record.ok and "answers" in record.notes:
            found.setdefault(record.arm, record.notes["answers"])
    if not found:
        return None
    columns: tuple[Column[str], ...] = (
        Column("arm", str, number=False),
        Column("asked", lambda arm: found[arm]["asked"], "{:,}".format),
        Column("right", lambda arm: found[arm]["right"], "{:,}".format),
        Column(
            "share", lambda arm: found[arm]["right"] / max(1, found[arm]["asked"]), "{:.1%}".format
        ),
    )
    return Table(columns, tuple(arm for arm in real_arms(cell) if arm in found))


# ------------------------------------------------------------------ which frames are picked


def drawn(found: Videos | None) -> list[str]:
    """Name the clips in the picture: those whose keyframes are known, the first few."""
    if found is None:
        return []
    known = [clip for clip in found.clips if found.facts(clip)["keyframe_places"] is not None]
    return known[:MOST_DRAWN]


def _second(facts: Json, place: int) -> float:
    """Return when a frame is shown, on a clip of even frames."""
    seconds, last = float(facts["seconds"]), max(1, int(facts["frames"]) - 1)
    return seconds * place / last


def keyframe_places(facts: Json) -> Iterator[int]:
    """Yield a clip's keyframes, which are noted as stretches: [first, step, how many]."""
    for first, step, count in facts["keyframe_places"]:
        yield from (first + step * i for i in range(count))


def picks_charts(cell: Json, found: Videos | None) -> Iterator[tuple[str, str]]:
    """Draw which frames every arm picks of a clip, above its keyframes: (caption, chart)."""
    for clip in drawn(found):
        assert found is not None, "there is a clip"
        facts, arms = found.facts(clip), found.clips[clip]
        rows = [arm for arm in real_arms(cell) if arm in arms]
        end = float(facts["seconds"]) or 1.0
        chart = SvgChart(
            title=f"frames picked of {clip}",
            x=(-0.01 * end, 1.01 * end),
            y=(-1.0, float(len(rows))),
            x_label="seconds from the first frame",
            height=24 * (len(rows) + 1) + 62,
            left=150,
        )
        chart.axes(y_ticks=False)
        chart.text(chart.left - 8, chart.py(-0.5), "the clip's keyframes")
        for place in keyframe_places(facts):
            at = _second(facts, place)
            chart.line([(at, -0.85), (at, -0.15)], "line control")
        styles = arm_classes(cell)
        for index, arm in enumerate(rows):
            y = len(rows) - index - 0.5
            style, mark = styles[arm]
            chart.text(chart.left - 8, chart.py(y), arm)
            for place, copies in sorted(Counter(arms[arm].picks).items()):
                at = _second(facts, place)
                times = f", {copies} times" if copies > 1 else ""
                chart.dot(at, y, style, mark, f"frame {place}{times}")
                if copies > 1:
                    chart.text(chart.px(at) + 7, chart.py(y) - 5, f"×{copies}", "start")
        yield clip, chart.svg()


def picks_figure(cell: Json, found: Videos) -> Figure:
    """Draw the same with matplotlib, a panel for every clip."""
    from matplotlib.figure import Figure

    clips = drawn(found)
    rows = max(len(found.clips[clip]) for clip in clips)
    figure = Figure(figsize=(8.4, (0.22 * rows + 0.75) * len(clips) + 0.3), layout="constrained")
    panels = figure.subplots(len(clips), 1, squeeze=False).ravel()
    for panel, clip in zip(panels, clips, strict=True):
        _draw_picks(panel, cell, found, clip)
    panels[-1].set_xlabel("seconds from the first frame")
    return figure


def _draw_picks(panel: Axes, cell: Json, found: Videos, clip: str) -> None:
    facts, arms = found.facts(clip), found.clips[clip]
    styles = arm_styles(cell)
    rows = [arm for arm in real_arms(cell) if arm in arms]
    keys = [_second(facts, place) for place in keyframe_places(facts)]
    panel.vlines(keys, -0.4 + len(rows), 0.4 + len(rows), color="#888888", linewidth=0.8)
    for index, arm in enumerate(rows):
        colour, mark = styles[arm]
        copies = Counter(arms[arm].picks)
        at = [_second(facts, place) for place in copies]
        panel.plot(at, [index] * len(at), mark, color=colour, markersize=4, linestyle="none")
        for when, times in zip(at, copies.values(), strict=True):
            if times > 1:
                panel.annotate(
                    f"×{times}", (when, index), (4, 1), textcoords="offset points", fontsize=6
                )
    panel.set_yticks(range(len(rows) + 1), [*rows, "the clip's keyframes"], fontsize=7)
    panel.set_ylim(len(rows) + 0.6, -0.7)
    panel.set_title(clip, fontsize=9)


def picks_stem(cell: Json) -> str:
    """Name the picture's files, without their endings."""
    return f"{slug(cell['cell'])}--picks"
