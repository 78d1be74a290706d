"""Matplotlib figures as PNG and SVG files: effects, runs in order, the roofline, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.analysis.charts.effects_chart import effects_chart, effects_stem
from labkit.analysis.charts.peak_kv_memory_chart import (
    kv_utilization_figure,
    kv_utilization_stem,
    kv_utilizations,
)
from labkit.analysis.charts.published_chart import PUBLISHED, published_chart, published_stem
from labkit.analysis.charts.roofline import roofline_figure, roofline_points, roofline_stem
from labkit.analysis.charts.run_timeline_charts import (
    run_timelines,
    timeline_figure,
    timeline_stem,
)
from labkit.analysis.charts.speed_quality_chart import (
    speed_quality_figure,
    speed_quality_stem,
)
from labkit.analysis.comparison.text_quality import text_qualities
from labkit.analysis.document.arm_styles import (
    COLOURS,
    arm_styles,
    figure_style,
    save_figure,
)
from labkit.analysis.document.chart import Band, Chart, Dots, Line
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.row_model import Row
from labkit.analysis.number_format import scaled, slug, unit_name
from labkit.analysis.tables.sweep_tables import curve_pictures
from labkit.analysis.tables.video_tables import (
    clip_records,
    drawn_clips,
    picks_figure,
    picks_stem,
)
from labkit.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LINE_COLOURS = {"zero": "black", "link": "#777777"}


def case_names(cell: Cell) -> list[str]:
    """Return the names of the measured cases, in order."""
    return list(dict.fromkeys(r.case for r in cell.rows if r.skipped is None))


def write_figures(cell: Cell, records: Sequence[Record], folder: Path) -> None:
    """Write a cell's pictures: effects, cases, curves, roofline, memory, quality, picked frames.

    A picture is left out if the records lack its data.
    """
    positions, points = cell.run_positions, roofline_points(cell, records)
    with figure_style():
        for case in case_names(cell):
            rows = [row for row in cell.rows if row.case == case]
            figure = case_figure(cell, rows, positions)
            save_figure(figure, folder / case_stem(cell, case))
        for stem, chart in row_pictures(cell):
            save_figure(row_chart_figure(cell, chart), folder / stem)
        for stem, picture in curve_pictures(cell):
            save_figure(picture, folder / stem)
        if points:
            save_figure(roofline_figure(cell, points), folder / roofline_stem(cell))
        if utilizations := kv_utilizations(cell):
            save_figure(kv_utilization_figure(utilizations), folder / kv_utilization_stem(cell))
        quality = speed_quality_figure(cell, text_qualities(cell.real_arms, records))
        if quality is not None:
            save_figure(quality, folder / speed_quality_stem(cell))
        clips = clip_records(cell, records)
        if clips is not None and drawn_clips(clips):
            save_figure(picks_figure(cell, clips), folder / picks_stem(cell))
        for timeline in run_timelines(records, cell.real_arms):
            save_figure(timeline_figure(timeline), folder / timeline_stem(cell, timeline.arm))


def row_pictures(cell: Cell) -> Iterator[tuple[str, Chart]]:
    """Yield (stem, chart) of the effects, and of the published differences beside ours."""
    for stem, chart in (
        (effects_stem(cell), effects_chart(cell)),
        (published_stem(cell), published_chart(cell)),
    ):
        if chart is not None:
            yield stem, chart


def row_chart_figure(cell: Cell, chart: Chart) -> Figure:
    """Return a matplotlib figure of a chart whose rows hold intervals and dots."""
    from matplotlib.figure import Figure

    height = 0.9 + len(chart.rows) * chart.row_height / 72
    figure = Figure(figsize=(7.2, min(height, 40.0)), layout="constrained")
    axes = figure.subplots()
    styles, labelled = arm_styles(cell), set[str]()
    for mark in chart.marks:
        if isinstance(mark, Band):
            axes.axvspan(mark.low, mark.high, color=COLOURS[4], alpha=0.2, linewidth=0)
        elif isinstance(mark, Line):
            colour = LINE_COLOURS.get(mark.style) or styles[mark.arm][0]
            axes.plot(*zip(*mark.points, strict=True), color=colour, linewidth=1.2)
        elif isinstance(mark, Dots):
            is_ours = mark.style != PUBLISHED
            colour, shape = styles[mark.arm] if is_ours else ("black", "D")
            name = mark.arm if is_ours else PUBLISHED
            axes.plot(
                *zip(*mark.points, strict=True), shape, color=colour, markersize=5,
                markerfacecolor=colour if is_ours else "white",
                label="_" if name in labelled else name,
            )  # fmt: skip
            labelled.add(name)
    count = len(chart.rows)
    axes.set_yticks([count - i - 0.5 for i in range(count)], list(chart.rows))
    axes.set_ylim(*chart.y)
    axes.set_xlim(*chart.x)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(chart.x_label)
    figure.legend(loc="outside lower center", ncols=min(4, len(labelled)))
    return figure


def case_stem(cell: Cell, case: str) -> str:
    """Return the name of a case's picture without the extension."""
    return cell.stem(f"{slug(case)}")


def case_figure(cell: Cell, rows: Sequence[Row], positions: Mapping[str, int]) -> Figure:
    """Return a figure of the rows of one case, one panel per metric."""
    from matplotlib.figure import Figure

    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    width, height = (7.2, 3.4) if len(rows) == 1 else (4.2 * columns, 2.6 * lines + 0.5)
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel in panels[len(rows) :]:
        panel.set_visible(False)
    for panel, row in zip(panels, rows, strict=False):
        draw_runs(panel, cell, row, positions)
    if len(rows) > 1:
        figure.suptitle(cell.title, fontsize=10)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)))
    return figure


def draw_runs(panel: Axes, cell: Cell, row: Row, positions: Mapping[str, int]) -> None:
    """Draw every run's value in run order, a line at each arm's median, and shaded blocks."""
    for arm, (colour, mark) in arm_styles(cell).items():
        values = row.arms[arm]
        if values.median is None:
            continue
        x = [positions[run.file] for run in values.runs]
        y = [scaled(run.value, row.unit) for run in values.runs]
        panel.plot(x, y, mark, color=colour, markersize=5, label=arm)
        panel.axhline(scaled(values.median, row.unit), color=colour, linewidth=1, alpha=0.7)
    start = 0
    for block, arms in enumerate(cell.design.order):
        if block % 2:
            panel.axvspan(start + 0.5, start + len(arms) + 0.5, color="black", alpha=0.04)
        start += len(arms)
    panel.set_xlim(0.5, start + 0.5)
    panel.set_xlabel("run, in the order it was run (blocks shaded)")
    if row.case == "all":
        panel.set_ylabel(unit_name(row.unit))
        panel.set_title(str(row.metric), fontsize=10)
    else:
        panel.set_ylabel(f"{row.metric} ({unit_name(row.unit)})")
        panel.set_title(row.case, fontsize=10)
