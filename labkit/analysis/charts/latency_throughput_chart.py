"""Latency against throughput at several loads: a table, an HTML chart and a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labkit.analysis.document.arm_styles import page_style_of
from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.svg_elements import add_point_labels
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.number_format import significant_text, value_text
from labkit.analysis.studies.latency_throughput import LoadCurve, LoadPoint

LoadLine = tuple[LoadCurve, LoadPoint]
KNEE_NOTE = (
    "Knee: the load with the greatest power, which is requests per second divided by the median "
    "time to the last token (Kleinrock 1979). No knee is marked if this is the largest load."
)
X_LABEL, Y_LABEL = "requests served per second", "time to the last token, median (ms)"
LATENCY_THROUGHPUT_STEM = "throughput-against-latency"


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
        Column("arm", lambda line: line[0].name, numeric=False),
        Column("load", lambda line: f"{line[1].size:g} {line[0].by}"),
        Column("served (1/s)", median_of("request_s"), value_text),
        Column("tok/s", median_of("total_tok_s"), value_text),
        Column("TTFT p50 (ms)", median_of("ttft_p50_ms"), value_text),
        Column("E2E p50 (ms)", median_of("e2e_p50_ms"), value_text),
        Column("E2E p99 (ms)", median_of("e2e_p99_ms"), value_text),
        Column("", lambda line: "knee" if line[1] is line[0].knee else "", numeric=False),
    )
    return Table(columns, tuple(lines), (KNEE_NOTE,))


def latency_throughput_chart(curves: Sequence[LoadCurve]) -> Chart:
    """Return a chart of latency over throughput: a line per arm, named at its knee or its end."""
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
        style, mark = page_style_of(index)
        chart.line(_points(curve), f"line {style}", curve.name)
        for load, (x, y) in zip(curve.loads, _points(curve), strict=True):
            knee = ", knee" if load is curve.knee else ""
            place = f"{significant_text(x, 4)} requests/s, {significant_text(y, 4)} ms"
            tip = f"{curve.name}, {load.size:g} {curve.by}{knee}: {place}"
            chart.dot(x, y, style, mark, tip, arm=curve.arm)
    add_point_labels(chart, map(_label, curves))
    return chart


def curve_keys(curves: Sequence[LoadCurve]) -> tuple[tuple[str, str, str], ...]:
    """Return the legend of :func:`latency_throughput_chart`: name, style class, shape."""
    return tuple((one.name, f"line {page_style_of(i)[0]}", "line") for i, one in enumerate(curves))


def _label(curve: LoadCurve) -> tuple[float, float, str]:
    """Return a curve's label and its place: at the knee, or else at the largest load."""
    if curve.knee is None:
        return (*_point(curve.loads[-1]), curve.name)
    return (*_point(curve.knee), f"{curve.name}: knee")


def _points(curve: LoadCurve) -> list[tuple[float, float]]:
    return [_point(load) for load in curve.loads]


def _point(load: LoadPoint) -> tuple[float, float]:
    """Return requests per second and median latency (ms)."""
    return load.medians["request_s"], load.medians["e2e_p50_ms"]
