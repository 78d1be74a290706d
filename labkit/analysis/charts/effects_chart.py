"""The chart of effects: every primary row's differences from the baseline with their intervals."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.analysis.document.arm_styles import arm_classes
from labkit.analysis.document.chart import ROW_HEIGHT, Chart, padded_range
from labkit.analysis.document.report_parts import (
    CellSource,
    ChartPart,
    PictureFile,
    ReportPart,
    section,
)
from labkit.analysis.findings.effect_wording import verdict_word
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.row_model import Row

ARM_HEIGHT = 13  # per arm, in a row with several arms
MAX_ROWS = 40  # the table shows the intervals of all rows


def effects_chart(cell: Cell) -> Chart | None:
    """Return a forest plot of the primary effects with their intervals and the shaded margin.

    Only the first ``MAX_ROWS`` rows are drawn. None if no effect is known.
    """
    rows = [
        row
        for row in cell.rows
        if row.primary and any(c.effect_pct is not None for c in row.comparisons)
    ]
    if not rows:
        return None
    shown = rows[:MAX_ROWS]
    margin = cell.design.margin_pct
    known = [pct for row in shown for c in row.comparisons for pct in c.known_pct]
    arms = len(cell.arms) - 1
    chart = Chart(
        title="effects with their intervals",
        x=padded_range([*known, -margin, margin]),
        y=(0.0, float(len(shown))),
        x_label=f"difference from {cell.baseline} (%), margin shaded",
        rows=tuple(row.name for row in shown),
        row_height=max(ROW_HEIGHT, ARM_HEIGHT * arms + 8),
    )
    chart.band(-margin, margin, "margin")
    chart.line([(0.0, 0.0), (0.0, float(len(shown)))], "zero")
    for i, row in enumerate(shown):
        _draw_effects(chart, cell, row, len(shown) - i - 0.5)
    if len(rows) > len(shown):
        chart.thinned.append(
            f"the first {len(shown)} of {len(rows):,} rows are drawn; the table has the intervals "
            "of all rows"
        )
    return chart


def _draw_effects(chart: Chart, cell: Cell, row: Row, middle: float) -> None:
    """Draw the effects of a row's arms, one above the other."""
    styles, step = arm_classes(cell), ARM_HEIGHT / chart.row_height
    arms = [arm for arm in styles if arm != cell.baseline]
    for place, arm in enumerate(arms):
        c, (style, mark) = row.comparison(arm), styles[arm]
        if c is None or c.effect_pct is None:
            continue
        y = middle + ((len(arms) - 1) / 2 - place) * step
        if c.ci_pct is not None:
            chart.line([(end, y) for end in c.ci_pct], f"line {style}", arm)
        word = verdict_word(c.verdict, row.metric, row.unit, row.better)
        tip = f"{row.name}, {arm}: {c.effect_pct:+.2f} %, {word}"
        chart.dot(c.effect_pct, y, style, mark, tip, arm=arm)


@section("Effects")
def effects_section(report: CellSource) -> Iterator[ReportPart]:
    """Show the effects as a chart."""
    chart = effects_chart(report.cell)
    if chart is not None:
        yield (part := ChartPart(chart))
        yield PictureFile(report.cell.stem("effects"), "Effects with their intervals", [part])
