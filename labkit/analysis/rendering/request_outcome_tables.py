"""Tables of request outcomes and arrival rates; table and chart of latency against throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.analysis.latency_throughput import LoadCurve, LoadPoint
from labkit.analysis.number_format import value_text
from labkit.analysis.rendering.arm_styles import COLOURS, MARKS
from labkit.analysis.rendering.chart import Chart, padded_range
from labkit.analysis.rendering.report_parts import Parts, section, table_parts
from labkit.analysis.rendering.table_model import Column, Table
from labkit.analysis.verdict_sentences import real_arms
from labkit.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from labkit.analysis.rendering.cell_report_content import CellReport

Json = Mapping[str, Any]
NotesByArm = Mapping[str, Sequence[Json]]
LoadLine = tuple[LoadCurve, LoadPoint]
COUNTS = {
    "requests": "requests",
    "served": "served",
    "refused": "refused",
    "failed": "failed",
}
KNEE_NOTE = (
    "Knee: the load with the greatest power, which is requests per second divided by the median "
    "time to the last token (Kleinrock 1979). No knee is marked if this is the largest load."
)
X_LABEL, Y_LABEL = "requests served per second", "time to the last token, median (ms)"
LATENCY_THROUGHPUT_STEM = "throughput-against-latency"


def request_notes(records: Sequence[Record]) -> dict[str, list[Json]]:
    """Return the notes on requests (``traffic`` in the records) of all runs, by arm."""
    notes: dict[str, list[Json]] = {}
    for record in records:
        for case in record.cases:
            if "traffic" in case.notes:
                notes.setdefault(record.arm, []).append(case.notes["traffic"])
    return notes


def request_outcomes_table(cell: Json, records: Sequence[Record]) -> Table[str] | None:
    """Return the outcomes of every arm's requests, or None if no record notes them."""
    notes = request_notes(records)
    arms = [arm for arm in real_arms(cell) if arm in notes]
    if not arms:
        return None
    all_notes = [note for arm_notes in notes.values() for note in arm_notes]
    open_loop = any("late_ms" in note for note in all_notes)
    columns = [Column[str]("arm", str, numeric=False)]
    columns += [_total_column(notes, key, heading) for key, heading in COUNTS.items()]
    if any("good" in note for note in all_notes):
        columns.append(_total_column(notes, "good", "within the limits"))
    if open_loop:
        columns += [_median_column(notes, heading, read) for heading, read in SENDER_TIMES.items()]
    if any(_sender_share(note) is not None for note in all_notes):
        share = _median_column(notes, "sender's share of a core", _sender_share, "{:.2%}".format)
        columns.append(share)
    lines = ["Requests of all runs. No other number includes refused or failed requests."]
    if open_loop:
        lines.append(
            "Medians over runs. Requested: the workload's request rate; due: the rate of the "
            "arrival times drawn from it; sent: the rate at which requests left the client. Wait "
            "at the client: because too many requests were in flight. Sender late: its own delay."
        )
    return Table(tuple(columns), tuple(arms), tuple(lines))


@section("Request outcomes")
def request_outcomes_section(report: CellReport) -> Parts:
    """Show the numbers of served, refused and failed requests."""
    return table_parts(request_outcomes_table(report.cell, report.records))


def _total_column(notes: NotesByArm, key: str, heading: str) -> Column[str]:
    return Column(heading, lambda arm: sum(note.get(key, 0) for note in notes[arm]), "{:,}".format)


def _median_column(
    notes: NotesByArm,
    heading: str,
    read: Callable[[Json], float | None],
    formatter: Callable[[Any], str] = value_text,
) -> Column[str]:
    """Return a column of medians over runs. A cell is empty if no run of the arm has the number."""

    def value(arm: str) -> float | None:
        values = [v for note in notes[arm] if (v := read(note)) is not None]
        return median(values) if values else None

    return Column(heading, value, lambda v: "" if v is None else formatter(v))


def _sender_share(note: Json) -> float | None:
    return note.get("sender_cpu_share")


def _nested(*path: str) -> Callable[[Json], float | None]:
    """Return a function that reads the number at a path of keys, or None if a key is missing."""

    def read(note: Json) -> float | None:
        value: Any = note
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return None if value is None else float(value)

    return read


SENDER_TIMES: Mapping[str, Callable[[Json], float | None]] = {
    "requested (1/s)": _nested("asked_per_s"),
    "due (1/s)": _nested("due_per_s"),
    "sent (1/s)": _nested("sent_per_s"),
    "wait at the client, p50 (ms)": _nested("queue_ms", "p50"),
    "p99": _nested("queue_ms", "p99"),
    "sender late, p99 (ms)": _nested("late_ms", "p99"),
}


def latency_throughput_table(curves: Sequence[LoadCurve]) -> Table[LoadLine] | None:
    """Return throughput and latency of every arm under every load, with the knees marked.

    None if ``curves`` is empty.
    """
    if not curves:
        return None
    lines = [(curve, load) for curve in curves for load in curve.loads]

    def median_of(metric: str) -> Callable[[LoadLine], float]:
        return lambda line: line[1].medians[metric]

    columns: tuple[Column[LoadLine], ...] = (
        Column("arm", lambda line: line[0].arm, numeric=False),
        Column("load", lambda line: f"{line[1].size:g} {line[0].by}"),
        Column("served (1/s)", median_of("request_s"), value_text),
        Column("tok/s", median_of("total_tok_s"), value_text),
        Column("TTFT p50 (ms)", median_of("ttft_p50_ms"), value_text),
        Column("E2E p50 (ms)", median_of("e2e_p50_ms"), value_text),
        Column("E2E p99 (ms)", median_of("e2e_p99_ms"), value_text),
        Column("", lambda line: "knee" if line[1] is line[0].knee else "", numeric=False),
    )
    return Table(columns, tuple(lines), (KNEE_NOTE,))


def latency_throughput_figure(curves: Sequence[LoadCurve]) -> Figure:
    """Return a matplotlib figure of the curves of :func:`latency_throughput_chart`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, curve in enumerate(curves):
        colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
        points = _points(curve)
        axes.plot(*zip(*points, strict=True), f"{mark}-", color=colour, label=curve.arm)
        for load, point in zip(curve.loads, points, strict=True):
            is_knee = load is curve.knee
            label = f"{load.size:g}" + (", knee" if is_knee else "")
            axes.annotate(
                label, point, (4, -11 if index % 2 else 5), textcoords="offset points",
                fontsize=7.5, color=colour, weight="bold" if is_knee else "normal",
            )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{X_LABEL}; at the marks: {', '.join({curve.by: None for curve in curves})}")
    axes.set_ylabel(Y_LABEL)
    figure.legend(loc="outside lower center", ncols=min(4, len(curves)))
    return figure


def latency_throughput_chart(curves: Sequence[LoadCurve]) -> Chart:
    """Return a chart of latency over throughput: a line per arm, with the knees marked."""
    points = [point for curve in curves for point in _points(curve)]
    chart = Chart(
        title="throughput against latency",
        x=padded_range([0.0, *(x for x, _ in points)]),
        y=padded_range([0.0, *(y for _, y in points)]),
        x_label=X_LABEL,
        y_label=Y_LABEL,
        height=300,
    )
    for index, curve in enumerate(curves):
        style = f"arm{index % 6}"
        chart.line(_points(curve), f"line {style}", curve.arm)
        for load, (x, y) in zip(curve.loads, _points(curve), strict=True):
            knee = ", knee" if load is curve.knee else ""
            tip = f"{curve.arm}, {load.size:g} {curve.by}{knee}: {x:,.4g} requests/s, {y:,.4g} ms"
            chart.dot(x, y, style, "circle", tip, arm=curve.arm)
        if curve.knee is not None:
            x, y = _point(curve.knee)
            chart.text(x, y, f"{curve.arm}: knee", "middle", dy=-10)
    return chart


def _points(curve: LoadCurve) -> list[tuple[float, float]]:
    return [_point(load) for load in curve.loads]


def _point(load: LoadPoint) -> tuple[float, float]:
    """Return requests per second and median latency (ms)."""
    return load.medians["request_s"], load.medians["e2e_p50_ms"]
