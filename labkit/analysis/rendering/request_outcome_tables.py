"""Tables of traffic: what became of requests and how they were sent, and a study under load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from labkit.analysis.latency_throughput import LoadCurve, LoadPoint
from labkit.analysis.number_format import value_text
from labkit.analysis.rendering.arm_styles import COLOURS, MARKS
from labkit.analysis.rendering.svg_elements import SvgChart, padded
from labkit.analysis.rendering.tables import Column, Table
from labkit.analysis.verdict_sentences import real_arms
from labkit.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
Noted = Mapping[str, Sequence[Json]]
KNEE = (
    "Knee: the load with the greatest power, requests per second over the median time to the last "
    "token (Kleinrock 1979); none is marked where that is the largest load."
)


def traffic(records: Sequence[Record]) -> dict[str, list[Json]]:
    """Return what each arm's runs note of their requests."""
    found: dict[str, list[Json]] = {}
    for record in records:
        for case in record.cases:
            if "traffic" in case.notes:
                found.setdefault(record.arm, []).append(case.notes["traffic"])
    return found


def request_outcomes_table(cell: Json, records: Sequence[Record]) -> Table[str] | None:
    """Lay out what became of every arm's requests; None where no run notes it."""
    noted = traffic(records)
    arms = [arm for arm in real_arms(cell) if arm in noted]
    if not arms:
        return None
    open_loop = any("late_ms" in note for notes in noted.values() for note in notes)
    columns = [Column[str]("arm", str, number=False), *map(_counted(noted), COUNTS)]
    if any("good" in note for notes in noted.values() for note in notes):
        columns.append(_counted(noted)(("good", "within the limits")))
    if open_loop:
        columns += [_middle(noted, heading, read) for heading, read in SENT.items()]
    if any(_share(note) is not None for notes in noted.values() for note in notes):
        columns.append(_middle(noted, "sender's share of a core", _share, "{:.2%}".format))
    notes = ["Requests of all runs; what was refused or failed is in no other number."]
    if open_loop:
        notes.append(
            "Rates as asked for, as drawn and as sent; waits where no more may be in flight, and "
            "how late the sender was by itself (medians over runs)."
        )
    return Table(tuple(columns), tuple(arms), tuple(notes))


COUNTS = (
    ("requests", "requests"), ("served", "served"), ("refused", "refused"), ("failed", "failed"),
)  # fmt: skip


def _counted(noted: Noted) -> Callable[[tuple[str, str]], Column[str]]:
    def column(named: tuple[str, str]) -> Column[str]:
        key, heading = named
        return Column(
            heading, lambda arm: sum(note.get(key, 0) for note in noted[arm]), "{:,}".format
        )

    return column


def _middle(
    noted: Noted,
    heading: str,
    read: Callable[[Json], float | None],
    form: Callable[[Any], str] = value_text,
) -> Column[str]:
    """Return a column of medians over runs; empty where no run knows the number."""

    def value(arm: str) -> float | None:
        known = [v for note in noted[arm] if (v := read(note)) is not None]
        return median(known) if known else None

    return Column(heading, value, lambda v: "" if v is None else form(v))


def _share(note: Json) -> float | None:
    return note.get("sender_cpu_share")


def _of(*path: str) -> Callable[[Json], float | None]:
    def read(note: Json) -> float | None:
        found: Any = note
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return None if found is None else float(found)

    return read


SENT: Mapping[str, Callable[[Json], float | None]] = {
    "asked (1/s)": _of("asked_per_s"),
    "due (1/s)": _of("due_per_s"),
    "sent (1/s)": _of("sent_per_s"),
    "wait at the client, p50 (ms)": _of("queue_ms", "p50"),
    "p99": _of("queue_ms", "p99"),
    "sender late, p99 (ms)": _of("late_ms", "p99"),
}


def latency_throughput_table(
    curves: Sequence[LoadCurve],
) -> Table[tuple[LoadCurve, LoadPoint]] | None:
    """Lay out every arm under every load, the knees marked; None without curves."""
    if not curves:
        return None
    lines = [(curve, load) for curve in curves for load in curve.loads]

    def middle(metric: str) -> Callable[[tuple[LoadCurve, LoadPoint]], float]:
        return lambda line: line[1].medians[metric]

    columns: tuple[Column[tuple[LoadCurve, LoadPoint]], ...] = (
        Column("arm", lambda line: line[0].arm, number=False),
        Column("load", lambda line: f"{line[1].size:g} {line[0].by}"),
        Column("served (1/s)", middle("request_s"), value_text),
        Column("tok/s", middle("total_tok_s"), value_text),
        Column("TTFT p50 (ms)", middle("ttft_p50_ms"), value_text),
        Column("E2E p50 (ms)", middle("e2e_p50_ms"), value_text),
        Column("E2E p99 (ms)", middle("e2e_p99_ms"), value_text),
        Column("", lambda line: "knee" if line[1] is line[0].knee else "", number=False),
    )
    return Table(columns, tuple(lines), (KNEE,))


X_LABEL, Y_LABEL = "requests served per second", "time to the last token, median (ms)"
LATENCY_THROUGHPUT_STEM = "throughput-against-latency"


def latency_throughput_figure(curves: Sequence[LoadCurve]) -> Figure:
    """Draw the same as :func:`latency_throughput_chart`, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, curve in enumerate(curves):
        colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
        points = [(load.medians["request_s"], load.medians["e2e_p50_ms"]) for load in curve.loads]
        axes.plot(*zip(*points, strict=True), f"{mark}-", color=colour, label=curve.arm)
        for load, point in zip(curve.loads, points, strict=True):
            knee = load is curve.knee
            said = f"{load.size:g}" + (", knee" if knee else "")
            axes.annotate(
                said, point, (4, -11 if index % 2 else 5), textcoords="offset points", fontsize=7.5,
                color=colour, weight="bold" if knee else "normal",
            )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{X_LABEL}; at the marks: {', '.join({curve.by: None for curve in curves})}")
    axes.set_ylabel(Y_LABEL)
    figure.legend(loc="outside lower center", ncols=min(4, len(curves)))
    return figure


def latency_throughput_chart(curves: Sequence[LoadCurve]) -> str:
    """Draw throughput against latency, a line per arm, its knee with a tip of its own."""
    served = [load.medians["request_s"] for curve in curves for load in curve.loads]
    waited = [load.medians["e2e_p50_ms"] for curve in curves for load in curve.loads]
    chart = SvgChart(
        title="throughput against latency",
        x=padded([0.0, *served]),
        y=padded([0.0, *waited]),
        x_label=X_LABEL,
        y_label=Y_LABEL,
        height=300,
    )
    chart.axes()
    for index, curve in enumerate(curves):
        style = f"arm{index % 6}"
        points = [(load.medians["request_s"], load.medians["e2e_p50_ms"]) for load in curve.loads]
        chart.line(points, f"line {style}")
        for load, (x, y) in zip(curve.loads, points, strict=True):
            knee = ", knee" if load is curve.knee else ""
            chart.dot(x, y, style, "circle", f"{curve.arm}, {load.size:g} {curve.by}{knee}")
        if curve.knee is not None:
            x, y = curve.knee.medians["request_s"], curve.knee.medians["e2e_p50_ms"]
            chart.text(chart.px(x), chart.py(y) - 10, f"{curve.arm}: knee", "middle")
    return chart.svg()
