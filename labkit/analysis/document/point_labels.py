"""Names beside the points of a chart, placed so that no name covers another."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.analysis.document.chart import Chart
from labkit.analysis.document.svg_elements import BOTTOM, CHARACTER, TOP

OFFSET = 8  # pixels from a point to its name
LINE_HEIGHT, ABOVE = 15, -10  # pixels: a line of text, and a name's baseline above its point
MAX_LINES = 10  # that a name is moved up or down
PHONE_PANEL = 230  # pixels: the panel's width on a narrow phone


def add_point_labels(chart: Chart, labels: Iterable[tuple[float, float, str]]) -> None:
    """Write names beside their points: right of them in the panel's left half, else left of them.

    The names of points that lie together are stacked, upwards first. A name without a free place
    stands directly above its point. The width is that of a phone: on a wider screen names are
    further apart.

    Parameters
    ----------
    chart
        A chart of fixed height whose ranges are final.
    labels
        (x, y, name) of each point, in data units.
    """
    height = chart.height - TOP - BOTTOM
    scale_x = PHONE_PANEL / (chart.x[1] - chart.x[0])
    scale_y = height / (chart.y[1] - chart.y[0])
    lines = sorted(range(-MAX_LINES, MAX_LINES + 1), key=abs)
    drawn: list[tuple[float, float, float]] = []  # left, right, baseline
    for x, y, name in labels:
        at, above = (x - chart.x[0]) * scale_x, (chart.y[1] - y) * scale_y
        width = CHARACTER * len(name) + OFFSET
        is_left = x < sum(chart.x) / 2
        left, right = (at, at + width) if is_left else (at - width, at)
        shift = next(
            (
                dy
                for dy in (ABOVE + LINE_HEIGHT * line for line in lines)
                if LINE_HEIGHT - 4 <= above + dy <= height
                and all(
                    right <= other[0]
                    or left >= other[1]
                    or abs(above + dy - other[2]) >= LINE_HEIGHT
                    for other in drawn
                )
            ),
            ABOVE,
        )
        drawn.append((left, right, above + shift))
        dx, anchor = (OFFSET, "start") if is_left else (-OFFSET, "end")
        chart.text(x, y, name, anchor, dx=dx, dy=shift)
