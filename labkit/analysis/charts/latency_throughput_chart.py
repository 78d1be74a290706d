"""Latency against throughput at several loads: a table, an HTML chart and a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from labkit.analysis.document.arm_styles import figure_style_of, page_style_of
from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.point_labels import add_point_labels
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.number_format import significant_text, value_text
from labkit.analysis.studies.latency_throughput import LoadCurve, LoadPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LoadLine = tuple[LoadCurve, LoadPoint]
KNEE_NOTE = (
    "Knee: the load with the greatest power, which is requests per second divided by the median "
    "time to the last token (Kleinrock 1979). No knee is marked if this is the largest load."
)
X_LABEL, Y_LABEL = "requests served per second", "time to the last token, median (ms)"
LEGEND_CHARACTERS = 90  # that fit into the width of the figure
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


def latency_throughput_figure(curves: Sequence[LoadCurve]) -> Figure:
    """Return a matplotlib figure of the curves of :func:`latency_throughput_chart`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, curve in enumerate(curves):
        colour, mark = figure_style_of(index)
        points = _points(curve)
        axes.plot(*zip(*points, strict=True), f"{mark}-", color=colour, label=curve.name)
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
    widest = max(len(curve.name) for curve in curves) + 6  # characters, with the mark
    columns = max(1, min(4, len(curves), LEGEND_CHARACTERS // widest))
    figure.legend(loc="outside lower center", ncols=columns)
    return figure


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
