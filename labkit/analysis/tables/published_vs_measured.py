"""Tables of a cell's published numbers; below each line are our own numbers of the same row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from labkit.analysis.comparison.output_identity import OutputAgreement
from labkit.analysis.document.chart import ROW_HEIGHT, Chart, padded_range
from labkit.analysis.document.report_parts import (
    CellSource,
    ChartPart,
    PictureFile,
    Prose,
    ReportPart,
    TablePart,
    section,
    table_parts,
)
from labkit.analysis.document.svg_chart_renderer import arm_classes
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell, PublishedRow
from labkit.analysis.model.result_row import ArmValues, Row
from labkit.analysis.number_format import percent_text, unit_name, value_text
from labkit.analysis.tables.kernel_launch_tables import host_times
from labkit.records import Record, counter_registry

AGREEMENT_METRICS = ("agreeing_prefix", "differing_requests")  # names that articles use
PUBLISHED = "published"  # the style class of published numbers
ARM_HEIGHT = 15  # per arm, in a row with several arms
CAPTION = (
    "Differences from the baseline: published by others (hollow diamonds) and measured here, "
    "with our intervals. The machines differ, so the numbers are never mixed"
)


def published_source(cell: Cell) -> str | None:
    """Return a line with the machine and the source of the published numbers, or None."""
    if cell.published is None:
        return None
    scale = f", which were run with scale={cell.scale}" if cell.scale else ""
    return (
        f"published: {cell.published.machine}; {cell.published.source}. "
        f"These numbers are never mixed with ours{scale}."
    )


def published_text(number: float, unit: str | None) -> str:
    """Return a published number as it was published; bytes in MiB, which is the unit printed."""
    return value_text(number, unit) if unit == "bytes" else f"{number:,}"


@dataclass(frozen=True)
class PublishedLine:
    """A line of published numbers or, with ``own_row``, our numbers of the same case and metric."""

    published_row: PublishedRow
    own_row: Row | None = None

    def number(self, arm: str) -> str:
        """Return an arm's number as text, or an empty string if the arm has none."""
        if self.own_row is None:
            numbers = self.published_row.arms
            return published_text(numbers[arm], self.published_row.unit) if arm in numbers else ""
        own_median = self.own_row.median(arm)
        return "" if own_median is None else value_text(own_median, self.own_row.unit)

    def delta(self, arm: str) -> str:
        """Return an arm's difference from the baseline as text, or an empty string if unknown."""
        if self.own_row is None:
            deltas = self.published_row.delta_pct
            return percent_text(deltas[arm]) if arm in deltas else ""
        comparison = self.own_row.comparison(arm)
        return "" if comparison is None else percent_text(comparison.effect_pct)


def _published_table(cell: Cell, extra_rows: Sequence[Row] = ()) -> Table[PublishedLine] | None:
    """Return the published numbers of this cell's cases, each line followed by our numbers.

    ``extra_rows``: own rows in addition to the cell's, in the same form. None if no number of any
    arm was published.
    """
    cases = {row.case for row in cell.rows}
    rows = [row for row in cell.published_rows if row.case in cases]
    published_arms = dict.fromkeys(arm for row in rows for arm in row.arms)
    if not published_arms:
        return None
    candidates = [*counter_rows(cell), *extra_rows, *cell.rows]
    own_rows = {(row.case, row.metric): row for row in candidates if row.metric is not None}
    lines = []
    for row in rows:
        lines.append(PublishedLine(row))
        if (own_row := own_rows.get((row.case, row.metric))) is not None:
            lines.append(PublishedLine(row, own_row))
    several_metrics = any(row.names_metric for row in rows)

    def name(line: PublishedLine) -> str:
        row, own_row = line.published_row, line.own_row
        if own_row is not None:
            return f"here ({unit_name(own_row.unit)})" if own_row.unit != row.unit else "here"
        return f"{row.case}: {row.metric} ({unit_name(row.unit)})" if several_metrics else row.case

    unit = "" if several_metrics else f" ({unit_name(rows[0].unit)})"
    arms = dict.fromkeys([*published_arms, *cell.real_arms])
    delta_arms = dict.fromkeys(arm for row in rows for arm in row.delta_pct)
    columns = [Column[PublishedLine]("published, and here", name, numeric=False)]
    columns += [Column(f"{arm}{unit}", partial(PublishedLine.number, arm=arm)) for arm in arms]
    for arm in delta_arms:
        heading = "delta" if len(delta_arms) == 1 else f"delta, {arm}"
        columns.append(Column(heading, partial(PublishedLine.delta, arm=arm)))
    shown = [column for column in columns if any(map(column.text, lines))]
    return Table(tuple(shown), tuple(lines), (published_source(cell) or "",))


def published_tables(cell: Cell) -> Iterator[tuple[str, Table[Sequence[Any]]]]:
    """Yield the title and content of each published table that is reproduced word for word."""
    for table in cell.published.tables if cell.published is not None else ():
        columns = tuple(
            Column[Sequence[Any]](str(heading), partial(_cell, index=index), numeric=index > 0)
            for index, heading in enumerate(table.columns)
        )
        notes = (*map(str, table.notes), published_source(cell) or "")
        yield table.title, Table(columns, table.rows, notes)


def _cell(row: Sequence[Any], index: int) -> str:
    return str(row[index]) if index < len(row) else ""


def _agreement_rows(agreements: Sequence[OutputAgreement]) -> Iterator[Row]:
    """Yield the agreement of outputs as rows: one for each of ``AGREEMENT_METRICS``."""
    prefix, requests = AGREEMENT_METRICS
    yield _row("all", prefix, "share", {a.arm: a.prefix for a in agreements})
    differing = {a.arm: float(a.total - a.agree) for a in agreements}
    yield _row("all", requests, "requests", differing)


def counter_rows(cell: Cell) -> Iterator[Row]:
    """Yield the engines' counters as rows, with their names as metrics."""
    for name in dict.fromkeys(name for by_name in cell.counters.values() for name in by_name):
        counter = counter_registry.find_counter(name)
        if counter is not None:
            known = {arm: own[name] for arm, own in cell.counters.items() if name in own}
            yield _row("all", name, counter.unit, known)


def _host_time_rows(records: Sequence[Record]) -> Iterator[Row]:
    """Yield the host times (us) of a step's maps and whole plan as rows."""
    for (case, name), arms in host_times(records).items():
        yield _row(case, name, "us", {arm: median(times) for arm, times in arms.items()})


def _row(case: str, metric: str, unit: str, medians: Mapping[str, float]) -> Row:
    values = {arm: ArmValues(median) for arm, median in medians.items()}
    return Row(case, metric, unit, arms=values)


@section("Published by others")
def published_section(report: CellSource) -> Iterator[ReportPart]:
    """Show published numbers beside ours."""
    agreement = _agreement_rows(report.analysis.identity.agreement)
    extra_rows = [*agreement, *_host_time_rows(report.records)]
    chart = _published_chart(report.cell)
    if chart is not None:
        yield (part := ChartPart(chart, CAPTION))
        yield PictureFile(report.cell.stem("published"), CAPTION, [part])
    yield from table_parts(_published_table(report.cell, extra_rows))
    for title, table in published_tables(report.cell):
        yield Prose([f"{title}:"])
        yield TablePart(table)


def _published_chart(cell: Cell) -> Chart | None:
    """Return the chart, or None if no row has both a published difference and one of ours."""
    styles, own = arm_classes(cell), {(row.case, row.metric): row for row in cell.rows}
    several = len({row.metric for row in cell.published_rows}) > 1
    found = [
        (f"{row.case}: {row.metric}" if several else row.case, arm, float(percent), comparison)
        for row in cell.published_rows
        if (row.case, row.metric) in own
        for arm, percent in row.delta_pct.items()
        if arm in styles
        for comparison in [own[row.case, row.metric].comparison(arm)]
    ]
    if not any(one is not None and one.effect_pct is not None for *_, one in found):
        return None
    names = list(dict.fromkeys(name for name, *_ in found))
    arms = list(dict.fromkeys(arm for _, arm, *_ in found))
    known = [percent for _, _, percent, _ in found]
    known += [pct for *_, one in found if one is not None for pct in one.known_pct]
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
    for name, arm, percent, one in found:
        y = len(names) - names.index(name) - 0.5
        y += ((len(arms) - 1) / 2 - arms.index(arm)) * step
        if one is not None and one.effect_pct is not None:
            chart.line([(percent, y), (one.effect_pct, y)], "link", arm)
            tip = f"{name}, {arm}, measured here: {percent_text(one.effect_pct)}"
            chart.effect(one.effect_pct, one.ci_pct, y, styles[arm], tip, arm)
        tip = f"{name}, {arm}, published: {percent_text(percent)}"
        chart.dot(percent, y, PUBLISHED, "diamond", tip, arm=arm)
    return chart
