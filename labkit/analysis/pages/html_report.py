"""``report.html``: the whole study as one self-contained page that loads no other files.

The page is complete without JavaScript. Its script (``templates/charts.js`` and
``templates/report.js``) reads the charts from one JSON element and draws them at the width of the
screen, with tooltips and a zoom, switches arms, sorts tables and keeps the view in the link.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.analysis.document.chart import Chart, changes
from labkit.analysis.document.report_parts import TEMPLATES, Chapter, Parts, Section, templates
from labkit.analysis.document.svg_chart_renderer import chart_svg
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.pages.report_sections import HTML_CHAPTERS
from labkit.analysis.pages.study_overview import machine_overviews
from labkit.analysis.studies.cell_summary import CellSummary, cell_labels
from labkit.analysis.studies.study_answer_sentence import study_answer, study_question

MAX_LEGEND = 160  # characters of all names; a longer legend does not stay in view
MAX_LINES = 300  # of a table that explains results; tables of results are complete
MAX_PICTURES = 6  # charts of rows that a reader without JavaScript sees
SCRIPTS = ("charts.js", "report.js")  # in this order


@dataclass(frozen=True)
class PageCell:
    """A cell on the page: its report, its label, and chapters with the parts that HTML shows."""

    report: CellReport
    label: str
    chapters: Sequence[tuple[Chapter, Sequence[tuple[Section, Parts]]]]


@dataclass
class PageCharts:
    """The charts of a page, numbered as they are shown, for its script."""

    content: list[Any] = field(default_factory=list)

    def add(self, chart: Chart) -> int:
        """Register a chart and return its number."""
        self.content.append(chart.to_json())
        return len(self.content) - 1

    def add_rows(self, rows: Sequence[tuple[int, str]], parts: Sequence[Any]) -> int:
        """Register the charts of several rows under one number, and return the number.

        The page shows one of them at a time. The first chart is stored in full, each other chart as
        its differences from the first (:func:`.chart.changes`).
        """
        first, *others = (part.chart.to_json() for part in parts)
        self.content.append(
            {
                "chart": first,
                "changes": [{}, *(changes(first, other) for other in others)],
                "rows": [list(row) for row in rows],
                "captions": [part.text for part in parts],
            }
        )
        return len(self.content) - 1

    def json(self) -> str:
        """Return all charts as JSON that may stand in a ``<script>`` element."""
        text = json.dumps(self.content, ensure_ascii=False, separators=(",", ":"))
        return text.replace("<", "\\u003c")


def study_html(study: str, cells: Sequence[CellSummary], reports: Sequence[CellReport]) -> str:
    """Return the HTML report of a study with this name, its cells on one page."""
    shown = list(map(_page_cell, reports, cell_labels(cells)))
    return _page(study, cells, shown)


def overview_html(study: str, cells: Sequence[CellSummary], links: Sequence[str], note: str) -> str:
    """Return the page of a study whose cells have pages of their own, at ``links``."""
    return _page(study, cells, [], links, note=note)


def cell_html(study: str, cell: CellSummary, report: CellReport, markdown: str) -> str:
    """Return a cell's own page, one folder below the study's; ``markdown``: its file of all."""
    shown = [_page_cell(report, report.cell.name)]
    return _page(study, [cell], shown, home="../report.html", markdown=markdown)


def _page(
    study: str,
    cells: Sequence[CellSummary],
    shown: Sequence[PageCell],
    links: Sequence[str] | None = None,
    *,
    note: str = "",
    home: str = "",
    markdown: str = "report.md",
) -> str:
    overviews = machine_overviews(cells, links)
    page: str = _template("report.html.j2").render(
        study=study,
        question=study_question(cells),
        answer=study_answer(cells),
        note=note,
        home=home,
        markdown=markdown,
        several=len(cells) > 1,
        has_header=len(cells) > 1 or any(one.capacities for one in overviews),
        num_cells=len(cells),
        many_arms=lambda report: sum(len(arm) for arm, _ in report.legend) > MAX_LEGEND,
        overviews=overviews,
        cells=shown,
        machine_states=_machine_states(cells),
        charts=PageCharts(),
        max_lines=MAX_LINES,
        max_pictures=MAX_PICTURES,
        svg=chart_svg,
        style=(TEMPLATES / "report.css").read_text("utf-8"),
        scripts=[(TEMPLATES / name).read_text("utf-8") for name in SCRIPTS],
    )
    return page


def _machine_states(cells: Sequence[CellSummary]) -> dict[str, list[str]]:
    """Return the labels of the cells during which the machine was busy or slowed, by state."""
    states: dict[str, list[str]] = {}
    for cell, label in zip(cells, cell_labels(cells), strict=True):
        for state in cell.machine_states:
            states.setdefault(state, []).append(label)
    return states


def _page_cell(report: CellReport, label: str) -> PageCell:
    macros = _template("report_parts.html.j2").module  # a macro for each kind of part
    chapters = []
    for chapter in HTML_CHAPTERS:
        every = ((one, one.parts(report)) for one in (*chapter.sections, *chapter.folded_sections))
        shown = ((one, [p for p in parts if hasattr(macros, p.kind)]) for one, parts in every)
        if sections := [(section, parts) for section, parts in shown if parts]:
            chapters.append((chapter, sections))
    return PageCell(report, label, chapters)


def _template(name: str) -> Any:
    return templates(trim_blocks=True).get_template(name)
