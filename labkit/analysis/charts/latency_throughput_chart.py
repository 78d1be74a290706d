"""Throughput against latency: the arms of a cell and their frontier, and an arm under loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.report_parts import CellSource, ChartPart, ReportPart, section
from labkit.analysis.document.svg_chart_renderer import add_point_labels, arm_classes, page_style_of
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import significant_text, unit_name, value_text
from labkit.analysis.studies.increasing_load import LoadCurve, LoadPoint, unequal_requests

LoadLine = tuple[LoadCurve, LoadPoint]
T = TypeVar("T")
KNEE_NOTE = (
    "Knee: the load with the greatest power, which is requests per second divided by the median "
    "time to the last token (Kleinrock 1979). No knee is marked if this is the largest load."
)
X_LABEL, Y_LABEL = "requests served per second", "time to the last token, median (ms)"
LATENCY_THROUGHPUT_STEM = "throughput-against-latency"
MIN_ARMS = 3
MAX_NAMED = 8  # arms on the frontier that the chart names; tooltips name every arm
THROUGHPUTS, LATENCIES = ("total_tok_s", "request_s"), ("e2e_p50_ms", "ttft_p50_ms")
CAPTION = (
    "Medians over runs. The line is the frontier: no other arm has both more throughput and less "
    "latency than an arm on the line. The medians are not tested here, but in the table of metrics"
)


def latency_throughput_table(curves: Sequence[LoadCurve]) -> Table[LoadLine] | None:
    """Return throughput and latency of each arm under each load, and the knees; None if empty."""
    if not curves:
        return None
    lines = [(curve, load) for curve in curves for load in curve.loads]

    def median_column(heading: str, metric: str) -> Column[LoadLine]:
        return Column(heading, lambda line: line[1].medians[metric], value_text)

    columns: tuple[Column[LoadLine], ...] = (
        Column("arm", lambda line: line[0].name, numeric=False),
        Column("load", lambda line: f"{line[1].size:g} {line[0].by}"),
        median_column("served (1/s)", "request_s"),
        median_column("tok/s", "total_tok_s"),
        median_column("TTFT p50 (ms)", "ttft_p50_ms"),
        median_column("E2E p50 (ms)", "e2e_p50_ms"),
        median_column("E2E p99 (ms)", "e2e_p99_ms"),
        Column("", lambda line: "knee" if line[1] is line[0].knee else "", numeric=False),
    )
    return Table(columns, tuple(lines), tuple(curve_notes(curves)))


def curve_notes(curves: Sequence[LoadCurve]) -> Iterator[str]:
    """Yield what a knee is and, if the loads of a curve have other requests, how many."""
    yield KNEE_NOTE
    notes = (unequal_requests([load.requests for load in curve.loads]) for curve in curves)
    yield from dict.fromkeys(filter(None, notes))


def latency_throughput_chart(curves: Sequence[LoadCurve]) -> Chart:
    """Return a chart of latency over throughput: a line per curve, named at its knee or end."""
    points = [point for curve in curves for point in _points(curve)]
    across, up = (padded_range([0.0, *values]) for values in zip(*points, strict=True))
    chart = Chart("throughput against latency", across, up, X_LABEL, Y_LABEL, height=300)
    for index, curve in enumerate(curves):
        style, mark = page_style_of(index)
        chart.line(_points(curve), f"line {style}", curve.name)
        for load, (x, y) in zip(curve.loads, _points(curve), strict=True):
            knee = ", knee" if load is curve.knee else ""
            place = f"{significant_text(x, 4)} requests/s, {significant_text(y, 4)} ms"
            tip = f"{curve.name}, {load.size:g} {curve.by}{knee}: {place}"
            chart.dot(x, y, style, mark, tip, arm=curve.name)
    add_point_labels(chart, map(_label, curves))
    return chart


def curve_keys(curves: Sequence[LoadCurve]) -> tuple[tuple[str, str, str], ...]:
    """Return the legend of :func:`latency_throughput_chart`: name, style class, shape."""
    return tuple((one.name, f"line {page_style_of(i)[0]}", "line") for i, one in enumerate(curves))


def _label(curve: LoadCurve) -> tuple[float, float, str]:
    """Return a curve's label and its place: at the knee, or else at the largest load."""
    name = curve.name if curve.knee is None else f"{curve.name}: knee"
    return (*_point(curve.knee or curve.loads[-1]), name)


def _points(curve: LoadCurve) -> list[tuple[float, float]]:
    return [_point(load) for load in curve.loads]


def _point(load: LoadPoint) -> tuple[float, float]:
    return load.medians["request_s"], load.medians["e2e_p50_ms"]


def frontier(
    points: Iterable[T], cost: Callable[[T], float], gain: Callable[[T], float]
) -> list[T]:
    """Return the Pareto frontier of a cost and a gain, ordered by cost."""
    best: list[T] = []
    for point in sorted(points, key=lambda p: (cost(p), -gain(p))):
        if not best or gain(point) > gain(best[-1]):
            best.append(point)
    return best


def _frontier_chart(cell: Cell) -> Chart | None:
    """Return the chart, or None for fewer than three arms with both metrics."""
    rows = {row.metric: row for row in cell.rows if row.case == "all"}
    pair = [next((m for m in names if m in rows), None) for names in (THROUGHPUTS, LATENCIES)]
    if pair[0] is None or pair[1] is None:
        return None
    throughput, latency = rows[pair[0]], rows[pair[1]]
    points = [
        (arm, rate, time)
        for arm in cell.real_arms
        if (rate := throughput.median(arm)) and (time := latency.median(arm))
    ]
    if len(points) < MIN_ARMS:
        return None
    chart = Chart(
        title="throughput against latency of the arms",
        x=padded_range([time for *_, time in points], 0.1),
        y=padded_range([rate for _, rate, _ in points], 0.1),
        x_label=f"{latency.metric} ({unit_name(latency.unit)})",
        y_label=f"{throughput.metric} ({unit_name(throughput.unit)})",
        height=320,
    )
    best = frontier(points, lambda point: point[2], lambda point: point[1])
    corners = [(best[0][2], best[0][1])]
    for (_, before, _), (_, rate, time) in pairwise(best):
        corners += [(time, before), (time, rate)]
    chart.line(corners, "zero")
    for arm, rate, time in points:
        style, mark = arm_classes(cell)[arm]
        where = ", on the frontier" if (arm, rate, time) in best else ""
        place = f"{value_text(rate)} {unit_name(throughput.unit)}"
        place += f", {value_text(time)} {unit_name(latency.unit)}"
        chart.dot(time, rate, style, mark, f"{arm}: {place}{where}", arm=arm)
    if len(best) <= MAX_NAMED:
        add_point_labels(chart, [(time, rate, arm) for arm, rate, time in best])
    return chart


@section("Throughput against latency")
def frontier_section(report: CellSource) -> Iterator[ReportPart]:
    """Show which arms offer the best compromise of throughput and latency."""
    chart = _frontier_chart(report.cell)
    if chart is not None:
        yield ChartPart(chart, CAPTION)
