"""Throughput against latency of a cell's arms, with the frontier of the best compromises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit.analysis.document.arm_styles import arm_classes
from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.report_parts import CellSource, ChartPart, Part, section
from labkit.analysis.document.svg_elements import add_point_labels
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import unit_name, value_text

MIN_ARMS = 3
MAX_NAMED = 8  # arms on the frontier that the chart names; tooltips name every arm
THROUGHPUTS, LATENCIES = ("total_tok_s", "request_s"), ("e2e_p50_ms", "ttft_p50_ms")
CAPTION = (
    "Medians over runs. The line is the frontier: no other arm has both more throughput and less "
    "latency than an arm on the line. The medians are not tested here, but in the table of metrics"
)


@dataclass(frozen=True)
class ArmPoint:
    """An arm's median throughput and latency, in the metrics' units."""

    arm: str
    throughput: float
    latency: float


def frontier(points: Sequence[ArmPoint]) -> list[ArmPoint]:
    """Return the Pareto frontier of throughput and latency, ordered by latency."""
    best: list[ArmPoint] = []
    for point in sorted(points, key=lambda p: (p.latency, -p.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best


def frontier_chart(cell: Cell) -> Chart | None:
    """Return the chart, or None for fewer than three arms with both metrics."""
    rows = {row.metric: row for row in cell.rows if row.case == "all"}
    pair = [next((m for m in names if m in rows), None) for names in (THROUGHPUTS, LATENCIES)]
    if pair[0] is None or pair[1] is None:
        return None
    throughput, latency = rows[pair[0]], rows[pair[1]]
    points = [
        ArmPoint(arm, rate, time)
        for arm in cell.real_arms
        if (rate := throughput.median(arm)) and (time := latency.median(arm))
    ]
    if len(points) < MIN_ARMS:
        return None
    chart = Chart(
        title="throughput against latency of the arms",
        x=padded_range([p.latency for p in points], 0.1),
        y=padded_range([p.throughput for p in points], 0.1),
        x_label=f"{latency.metric} ({unit_name(latency.unit)})",
        y_label=f"{throughput.metric} ({unit_name(throughput.unit)})",
        height=320,
    )
    best = frontier(points)
    steps = [(a.latency, b.throughput) for a, b in zip(best[1:], best, strict=False)]
    corners = [corner for at, step in zip(best, [*steps, None], strict=True)
               for corner in ((at.latency, at.throughput), step) if corner is not None]  # fmt: skip
    chart.line(corners, "zero")
    for point in points:
        style, mark = arm_classes(cell)[point.arm]
        where = ", on the frontier" if point in best else ""
        tip = (
            f"{point.arm}: {value_text(point.throughput)} {unit_name(throughput.unit)}, "
            f"{value_text(point.latency)} {unit_name(latency.unit)}{where}"
        )
        chart.dot(point.latency, point.throughput, style, mark, tip, arm=point.arm)
    if len(best) <= MAX_NAMED:
        add_point_labels(chart, [(p.latency, p.throughput, p.arm) for p in best])
    return chart


@section("Throughput against latency")
def frontier_section(report: CellSource) -> Iterator[Part]:
    """Show which arms offer the best compromise of throughput and latency."""
    chart = frontier_chart(report.cell)
    if chart is not None:
        yield ChartPart(chart, CAPTION)
