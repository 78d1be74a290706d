"""``history-METRIC.md`` and ``.html``: a metric over weeks and commits, with change points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.report_parts import templates
from labkit.analysis.document.svg_chart_renderer import chart_svg
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.findings.effect_wording import amount_text, effect_phrase
from labkit.analysis.findings.short_answer import capitalised
from labkit.analysis.number_format import p_text, percent_text, scaled, unit_name, value_text
from labkit.analysis.pages.markdown_report import markdown_html, markdown_table
from labkit.analysis.pages.report_files import study_link, write_text
from labkit.analysis.studies.metric_history import (
    HistoryPoint,
    Series,
    SeriesChange,
    metric_history,
)
from labkit.analysis.text_format import join_names, markdown_text, slug
from labkit.config import count_text
from labkit.records.metric_registry import MetricDefinition, metric_definition

MAX_NAMES = 3  # of the studies that are left out for one cause


@dataclass(frozen=True)
class HistoryPage:
    """The history of one metric over the studies in a folder."""

    root: Path
    metric: str
    series: Sequence[Series]

    @property
    def path(self) -> Path:
        """The HTML page's file; the Markdown page stands beside it."""
        return self.root / f"history-{slug(self.metric)}.html"

    @property
    def summary(self) -> str:
        studies = len({point.study for one in self.series for point in one.points})
        source = "1 study" if studies == 1 else f"{studies} studies"
        changes = count_text(sum(len(one.changes) for one in self.series), "change")
        tested = count_text(sum(one.is_tested for one in self.series), "line")
        found = f"{changes} in the {tested} with enough studies to find one"
        left_out = sum(len(one.left_out) for one in self.series)
        if left_out:
            source += f" ({count_text(left_out, 'point')} left out, as a gate failed)"
        return f"{self.metric}: {count_text(len(self.series), 'line')} from {source}, {found}"

    @property
    def changes(self) -> list[str]:
        pairs = ((one, change) for one in self.series for change in one.changes)
        return [f"{one.name}: {change_text(one, change)}" for one, change in pairs]

    def markdown(self) -> str:
        """Return the page in Markdown, without charts."""
        lines = [f"# History of {self.metric}", "", f"{self.summary}.", "", NOTE, ""]
        for one in self.series:
            lines += [f"## {one.name}", "", f"{one.machine}. {markdown_text(_verdict(one))}", ""]
            lines += [markdown_table(_table(self.root, one)), ""]
        return "\n".join(lines)

    def html(self) -> str:
        """Return the page in HTML, with a chart for each series of two studies or more."""
        sections = [
            (one, _verdict(one), _chart(one), markdown_html(markdown_table(_table(self.root, one))))
            for one in self.series
        ]
        page = templates().get_template("history.html.j2")
        return str(page.render(page=self, note=NOTE, sections=sections))


NOTE = (
    "Each point is a study: the median over its processes, with their quartiles. Change points "
    "are tested by permuting the order of the studies, with an error rate of 5 % for all "
    "lines together. Studies are not interleaved, so the machine may have changed instead of the "
    "code: each change is shown with the change of the machine's arm-blind probe. To test one "
    "commit against another, run python -m labkit.regression."
)


def change_text(series: Series, change: SeriesChange) -> str:
    """Return a change's size, the studies around it, and the change of the probe."""
    before, after = series.points[change.index - 1], series.points[change.index]
    how = _change_phrase(metric_definition(series.metric, series.unit), change)
    probe = "the machine has no probe"
    if change.probe_percent is not None:
        probe = f"the time of the machine's probe changed by {percent_text(change.probe_percent)}"
    where = f"between {_place(before)} and {_place(after)} (p {p_text(change.p)})"
    return f"{how} after a change {where}; {probe}"


def _change_phrase(metric: MetricDefinition, change: SeriesChange) -> str:
    """Return a change's size: in the metric's unit where it has no percentage."""
    if change.percent is not None:
        return effect_phrase(metric, [change.percent], base=change.before)
    differences = [change.after - change.before]
    effects = [math.copysign(math.inf, differences[0])]
    if not metric.words.in_unit:
        return effect_phrase(metric, effects, differences=differences)
    amount = amount_text(metric, effects, differences=differences)
    return effect_phrase(metric, effects, amount=amount)


def _place(point: HistoryPoint) -> str:
    return f"{point.started[:10]} {point.commit}".strip()


def _verdict(series: Series) -> str:
    texts = [f"{capitalised(change_text(series, change))}." for change in series.changes]
    if not texts:
        texts = ["No change." if series.is_tested else "Too few studies to find a change."]
    if series.left_out:
        names: dict[str | None, list[str]] = {}
        for point in series.left_out:
            names.setdefault(point.cause, []).append(point.study.name)
        points = "; ".join(f"{_first_names(of)} ({cause})" for cause, of in names.items())
        count = count_text(len(series.left_out), "point")
        texts.append(f"{count} left out, as a gate failed: {points}.")
    return " ".join(texts)


def _first_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return join_names([*names[:MAX_NAMES], f"{more} more"] if more > 0 else names)


def _table(root: Path, series: Series) -> Table[HistoryPoint]:
    value = partial(value_text, unit=series.unit)
    unit = unit_name(series.unit)
    return Table(
        (
            Column("date", lambda point: point.started[:16].replace("T", " "), numeric=False),
            Column("commit", lambda point: point.commit, numeric=False),
            Column("study", lambda point: study_link(root, point.study), numeric=False),
            Column(unit, lambda point: value(point.value)),
            Column("quartiles", lambda point: f"{value(point.low)} to {value(point.high)}"),
            Column("runs", lambda point: point.runs),
            Column("probe, µs", lambda point: value_text(point.probe_us)),
        ),
        series.points,
    )


def _chart(series: Series) -> str:
    """Return the series as an ``<svg>``: a point per study, segment medians and changes."""
    times = [datetime.fromisoformat(point.started).timestamp() / 86_400 for point in series.points]
    if len(times) < 2:
        return ""
    first = min(times)
    days = [time - first for time in times]
    y = partial(scaled, unit=series.unit)
    limits = [y(limit) for point in series.points for limit in (point.low, point.high)]
    chart = Chart(
        series.name,
        padded_range(days),
        padded_range(limits),
        f"days since {series.points[0].started[:10]}",
        unit_name(series.unit),
    )
    bounds = [0, *(change.index for change in series.changes), len(days)]
    for begin, end in pairwise(bounds):
        middle = y(median(point.value for point in series.points[begin:end]))
        chart.line([(days[begin], middle), (days[end - 1], middle)], "median")
    for change in series.changes:
        chart.band(days[change.index - 1], days[change.index], "margin")
    for day, point in zip(days, series.points, strict=True):
        chart.line([(day, y(point.low)), (day, y(point.high))], "range")
        tip = f"{_place(point)}: {value_text(point.value, series.unit)} {unit_name(series.unit)}"
        chart.dot(day, y(point.value), "dot", tip=tip)
    return chart_svg(chart)


def write_history(root: Path, metric: str) -> HistoryPage:
    """Write the pages of a metric's history into a folder of studies.

    Raises ``RecordError`` if a record is not valid or was edited, or no study has the metric; then
    nothing has been written.
    """
    page = HistoryPage(root, metric, metric_history(root, metric))
    write_text(page.path.with_suffix(".md"), page.markdown())
    write_text(page.path, page.html())
    return page
