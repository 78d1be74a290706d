"""The building blocks of a cell's report: sections, and the parts that a section consists of.

A section has a title and parts. The Markdown report and the HTML report each show a list of
sections (:mod:`labkit.analysis.pages.report_sections`). A renderer writes the parts that its
format can show and leaves out a section without parts.

Declare a section beside the table or chart that it shows::

    @section("Failed runs")
    def failures_section(report: CellSource) -> Parts:
        return table_parts(_failures_table(report.cell, report.record_folder))

    dispatch_section = table_section("Work per dispatch", _dispatch_table)

and name it in :mod:`labkit.analysis.pages.report_sections`: in a chapter of the HTML page, in
the list of the Markdown report, or in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.document.chart import Chart
from labkit.analysis.document.table_model import Table
from labkit.analysis.model.cell_model import Cell
from labkit.records import Record


@dataclass(frozen=True)
class CellSource:
    """What the sections of a cell's report are made from."""

    analysis: CellAnalysis
    # Prefix of links to records: the cell's folder relative to the report, or empty.
    record_folder: str = ""
    anchor: str = ""  # prefix of the cell's anchors on the HTML page

    @property
    def cell(self) -> Cell:
        return self.analysis.cell

    @property
    def records(self) -> Sequence[Record]:
        """The cell's records, with the times that its verdicts are about."""
        return self.analysis.data.judged_records


Source = TypeVar("Source", bound=CellSource)
TEMPLATES = Path(__file__).parents[1] / "pages" / "templates"


@cache
def templates(trim_blocks: bool = False) -> Any:
    """Return jinja2's environment of the pages' templates, cached since compiling takes long."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=trim_blocks,
    )


@dataclass(frozen=True)
class Prose:
    """Lines of text."""

    lines: Sequence[str]
    kind: ClassVar[str] = "prose"


@dataclass(frozen=True)
class BulletList:
    """A list of sentences."""

    lines: Sequence[str]
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True)
class TablePart:
    """A table with its notes."""

    table: Table[Any]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class ChartPart:
    """A chart; HTML only."""

    chart: Chart
    caption: str = ""
    # Name, style class and shape (``line`` or ``bar``) of what the chart draws besides arms.
    keys: tuple[tuple[str, str, str], ...] = ()
    arm: str = ""  # the arm that the whole chart is about, or empty
    kind: ClassVar[str] = "chart"

    @property
    def text(self) -> str:
        """The caption, with a note on the points or rows that the chart leaves out."""
        return "; ".join(filter(None, [self.caption, *self.chart.thinned]))


@dataclass(frozen=True)
class PictureFile:
    """A picture ``plots/STEM``; Markdown only. ``charts``: its panels, ``columns`` side by side."""

    stem: str
    caption: str
    charts: Sequence[ChartPart]
    columns: int = 1
    captioned: bool = False  # whether the caption also stands below the picture, as text
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True)
class RowCharts:
    """One chart for each row of the cell; HTML only.

    Without its script the page shows the first few charts. With the script it shows the chart of
    one row, which the reader chooses.

    ``rows`` holds, for each chart, its row's index in the cell and the row's name.
    """

    rows: Sequence[tuple[int, str]]
    parts: Sequence[ChartPart]
    kind: ClassVar[str] = "row_charts"


@dataclass(frozen=True)
class StepPlayer:
    """The player of traced steps, an HTML element with its script; HTML only."""

    html: str
    kind: ClassVar[str] = "step_player"


class ReportPart(Protocol):
    """A part of a section, such as a table or a chart.

    The HTML page renders a part with the macro in ``report_parts.html.j2`` that is named like the
    part's ``kind``. It leaves out parts without a macro. The Markdown report shows only the kinds
    that it can render.
    """

    kind: ClassVar[str]


Parts = Sequence[ReportPart]


@dataclass(frozen=True)
class Section:
    """A title and a function that returns the section's parts; without parts it is left out."""

    title: str
    parts: Callable[[Any], Parts]  # of a CellSource


@dataclass(frozen=True)
class Chapter:
    """A chapter of a cell's HTML report. The page's table of contents lists it."""

    name: str  # its name in the table of contents
    # Its sections. The chapter is left out if none of them has parts.
    sections: tuple[Section, ...]
    # Further sections, whose content is folded under their titles.
    folded_sections: tuple[Section, ...] = ()
    is_open: bool = False  # whether the chapter itself is unfolded


def section(title: str) -> Callable[[Callable[[Source], Iterable[ReportPart]]], Section]:
    """Return a decorator that turns a function from a report to parts into a :class:`Section`."""

    def declare(parts: Callable[[Source], Iterable[ReportPart]]) -> Section:
        return Section(title, lambda report: list(parts(report)))

    return declare


CellTable = Callable[[Cell, Sequence[Record]], Table[Any] | None]


def table_section(title: str, *tables: CellTable) -> Section:
    """Return a section of the tables that functions of a cell and its records give, if any."""
    return Section(
        title, lambda report: table_parts(*(t(report.cell, report.records) for t in tables))
    )


def table_parts(*tables: Table[Any] | None) -> Parts:
    """Return the tables as parts. Tables that are None or have no lines are left out."""
    return [TablePart(table) for table in tables if table is not None and table.lines]
