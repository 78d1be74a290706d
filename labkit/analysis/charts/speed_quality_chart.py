"""Speed against quality: a point per arm with both intervals, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.analysis.comparison.text_quality import TextQuality
from labkit.analysis.document.arm_styles import arm_classes
from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.point_labels import add_point_labels
from labkit.analysis.findings.quality_answer import interval_text
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.statistics.block_jackknife import Interval

if TYPE_CHECKING:
    pass

SPEED = "total_tok_s"
Y_LABEL = "KL divergence, mean (nats)"
CAPTION = (
    "Speed against quality, with both intervals. The line is the frontier: no other arm is "
    "estimated to be both faster and closer to the baseline than an arm on the line"
)


@dataclass(frozen=True)
class SpeedAndQuality:
    """An arm's speed compared with the baseline in percent, and its mean KL divergence in nats."""

    arm: str
    speed: Interval
    kl: Interval


def speed_quality_points(cell: Cell, qualities: Sequence[TextQuality]) -> list[SpeedAndQuality]:
    """Return a point for the baseline (0 %, 0 nats), and for each arm whose effect is known.

    ``qualities``: the arms' qualities, the baseline's first.
    """
    effects = {
        one.arm: Interval(one.effect_pct, one.ci_low_pct, one.ci_high_pct)
        for row in cell.rows
        if row.metric == SPEED
        for one in row.comparisons
        if one.effect_pct is not None
    }
    points = []
    for index, quality in enumerate(qualities):
        if index == 0:
            points.append(SpeedAndQuality(quality.arm, Interval(0.0, 0.0, 0.0), quality.kl_mean))
        elif quality.arm in effects:
            points.append(SpeedAndQuality(quality.arm, effects[quality.arm], quality.kl_mean))
    return points


def frontier(points: Sequence[SpeedAndQuality]) -> list[SpeedAndQuality]:
    """Return the Pareto frontier of speed and KL divergence, the smallest divergence first."""
    best: list[SpeedAndQuality] = []
    for point in sorted(points, key=lambda p: (p.kl.estimate, -p.speed.estimate)):
        if not best or point.speed.estimate > best[-1].speed.estimate:
            best.append(point)
    return best


def speed_quality_chart(cell: Cell, qualities: Sequence[TextQuality]) -> Chart | None:
    """Return the chart, or None if no arm besides the baseline has a known speed and quality."""
    points = speed_quality_points(cell, qualities)
    if len(points) < 2:
        return None
    chart = Chart(
        title="speed against quality",
        x=padded_range([end for point in points for end in _known(point.speed)]),
        y=padded_range([end for point in points for end in _known(point.kl)]),
        x_label=_x_label(points),
        y_label=Y_LABEL,
        height=300,
    )
    best, styles = frontier(points), arm_classes(cell)
    chart.line([(point.speed.estimate, point.kl.estimate) for point in best], "zero")
    for point in points:
        style, mark = styles[point.arm]
        x, y = point.speed.estimate, point.kl.estimate
        chart.line([(end, y) for end in _known(point.speed)], f"line {style}", point.arm)
        chart.line([(x, end) for end in _known(point.kl)], f"line {style}", point.arm)
        where = ", on the frontier" if point in best else ""
        tip = f"{point.arm}: {x:+.2f} %, KL {interval_text(point.kl)} nats{where}"
        chart.dot(x, y, style, mark, tip, arm=point.arm)
    add_point_labels(chart, [(p.speed.estimate, p.kl.estimate, p.arm) for p in points])
    return chart


def _x_label(points: Sequence[SpeedAndQuality]) -> str:
    return f"speed compared with {points[0].arm} (%)"


def _known(interval: Interval) -> list[float]:
    """Return both limits of an interval, or the estimate alone if the interval is unbounded."""
    if interval.low is None or interval.high is None:
        return [interval.estimate]
    return [interval.low, interval.high]
