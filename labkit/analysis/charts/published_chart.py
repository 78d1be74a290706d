"""Published differences beside ours: a row per case, theirs and ours joined by a line."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.analysis.document.arm_styles import arm_classes
from labkit.analysis.document.chart import ROW_HEIGHT, Chart, padded_range
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.row_model import Comparison
from labkit.analysis.number_format import percent_text

PUBLISHED = "published"  # the style class of published numbers
ARM_HEIGHT = 15  # per arm, in a row with several arms
CAPTION = (
    "Differences from the baseline: published by others (hollow diamonds) and measured here, "
    "with our intervals. The machines differ, so the numbers are never mixed"
)


@dataclass(frozen=True)
class PublishedDifference:
    """A published difference in percent, and our comparison of the same row and arm, or None."""

    row: str
    arm: str
    published_pct: float
    comparison: Comparison | None

    @property
    def is_known(self) -> bool:
        """Whether we know the effect too."""
        return self.comparison is not None and self.comparison.effect_pct is not None


def published_differences(cell: Cell) -> list[PublishedDifference]:
    """Return the published differences for this cell's arms and rows."""
    rows, styles = cell.published_rows, arm_classes(cell)
    several_metrics = len({row.metric for row in rows}) > 1
    own = {(row.case, row.metric): row for row in cell.rows}
    return [
        PublishedDifference(
            f"{row.case}: {row.metric}" if several_metrics else row.case,
            arm,
            float(percent),
            own[row.case, row.metric].comparison(arm),
        )
        for row in rows
        if (row.case, row.metric) in own
        for arm, percent in row.delta_pct.items()
        if arm in styles
    ]


def published_chart(cell: Cell) -> Chart | None:
    """Return the chart, or None if no row has both a published difference and one of ours."""
    found = published_differences(cell)
    if not any(one.is_known for one in found):
        return None
    names = list(dict.fromkeys(one.row for one in found))
    arms = list(dict.fromkeys(one.arm for one in found))
    known = [one.published_pct for one in found]
    known += [
        pct for one in found if one.comparison is not None for pct in one.comparison.known_pct
    ]
    chart = Chart(
        title="published differences beside ours",
        x=padded_range([*known, 0.0]),
        y=(0.0, float(len(names))),
        x_label=f"difference from {cell.baseline} (%)",
        rows=tuple(names),
        row_height=max(ROW_HEIGHT, ARM_HEIGHT * len(arms) + 8),
    )
    chart.line([(0.0, 0.0), (0.0, float(len(names)))], "zero")
    step = ARM_HEIGHT / chart.row_height
    for one in found:
        middle = len(names) - names.index(one.row) - 0.5
        _draw(chart, cell, one, middle + ((len(arms) - 1) / 2 - arms.index(one.arm)) * step)
    return chart


def _draw(chart: Chart, cell: Cell, one: PublishedDifference, y: float) -> None:
    style, mark = arm_classes(cell)[one.arm]
    comparison = one.comparison
    if comparison is not None and comparison.effect_pct is not None:
        ours = comparison.effect_pct
        chart.line([(one.published_pct, y), (ours, y)], "link", one.arm)
        if comparison.ci_pct is not None:
            chart.line([(end, y) for end in comparison.ci_pct], f"line {style}", one.arm)
        tip = f"{one.row}, {one.arm}, measured here: {percent_text(ours)}"
        chart.dot(ours, y, style, mark, tip, arm=one.arm)
    tip = f"{one.row}, {one.arm}, published: {percent_text(one.published_pct)}"
    chart.dot(one.published_pct, y, PUBLISHED, "diamond", tip, arm=one.arm)
