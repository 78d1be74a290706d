"""Speed against quality of a scoring workload's arms, with both intervals and the frontier."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.charts.latency_throughput_chart import frontier
from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.svg_chart_renderer import add_point_labels, arm_classes
from labkit.analysis.findings.output_quality_sentences import interval_text
from labkit.analysis.model.cell_model import ArmQuality, Cell
from labkit.analysis.number_format import percent_text
from labkit.analysis.statistics.text_window_intervals import Interval

SPEED = "total_tok_s"
Y_LABEL = "KL divergence, mean (nats)"
SPEED_QUALITY_CAPTION = (
    "Speed against quality, with both intervals. The line is the frontier: no other arm is "
    "estimated to be both faster and closer to the baseline than an arm on the line"
)


def real_qualities(cell: Cell) -> list[ArmQuality]:
    """Return the quality of every arm except the control."""
    return [quality for quality in cell.quality or () if quality.arm in cell.real_arms]


@dataclass(frozen=True)
class _SpeedAndQuality:
    """An arm's speed compared with the baseline in percent, and its mean KL divergence in nats."""

    arm: str
    speed: Interval
    kl: Interval


def _speed_quality_points(cell: Cell) -> list[_SpeedAndQuality]:
    """Return a point for the baseline (0 %, 0 nats), and for each arm whose effect is known."""
    speeds = {
        one.arm: Interval(one.effect_pct, one.ci_low_pct, one.ci_high_pct)
        for row in cell.rows
        if row.metric == SPEED
        for one in row.comparisons
        if one.effect_pct is not None
    }
    speeds[cell.baseline] = Interval(0.0, 0.0, 0.0)
    return [
        _SpeedAndQuality(quality.arm, speeds[quality.arm], quality.metrics["kl_mean"])
        for quality in real_qualities(cell)
        if quality.arm in speeds
    ]


def speed_quality_chart(cell: Cell) -> Chart | None:
    """Return the chart, or None if no arm besides the baseline has a known speed and quality."""
    points = _speed_quality_points(cell)
    if len(points) < 2:
        return None
    chart = Chart(
        title="speed against quality",
        x=padded_range([end for point in points for end in _known(point.speed)]),
        y=padded_range([end for point in points for end in _known(point.kl)]),
        x_label=f"speed compared with {points[0].arm} (%)",
        y_label=Y_LABEL,
        height=300,
    )
    best = frontier(points, lambda p: p.kl.estimate, lambda p: p.speed.estimate)
    styles = arm_classes(cell)
    chart.line([(point.speed.estimate, point.kl.estimate) for point in best], "zero")
    for point in points:
        style, mark = styles[point.arm]
        x, y = point.speed.estimate, point.kl.estimate
        chart.line([(end, y) for end in _known(point.speed)], f"line {style}", point.arm)
        chart.line([(x, end) for end in _known(point.kl)], f"line {style}", point.arm)
        where = ", on the frontier" if point in best else ""
        tip = f"{point.arm}: {percent_text(x)}, KL {interval_text(point.kl)} nats{where}"
        chart.dot(x, y, style, mark, tip, arm=point.arm)
    add_point_labels(chart, [(p.speed.estimate, p.kl.estimate, p.arm) for p in points])
    return chart


def _known(interval: Interval) -> list[float]:
    """Return both limits of an interval, or the estimate alone if the interval is unbounded."""
    if interval.low is None or interval.high is None:
        return [interval.estimate]
    return [interval.low, interval.high]
