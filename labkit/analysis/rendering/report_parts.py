"""The building blocks of a cell's report: sections, and the parts that a section consists of.

A section has a title and parts. The Markdown report and the HTML report each show a list of
sections (:mod:`labkit.analysis.rendering.report_sections`). A renderer writes the parts that its
format can show and leaves out a section without parts.

Declare a section beside the table or chart that it shows::

    @section("Failed runs")
    def failures_section(report: CellReport) -> Parts:
        return table_parts(failures_table(report.cell, report.record_folder))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from labkit.analysis.rendering.table_model import Table

if TYPE_CHECKING:
    from labkit.analysis.rendering.cell_report_content import CellReport

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Prose:
    """Lines of text."""

    lines: Sequence[str]
    kind: ClassVar[str] = "prose"


@dataclass(frozen=True)
class BulletList:
    """A list of sentences; Markdown only."""

    lines: Sequence[str]
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True)
class TablePart:
    """A table with its notes."""

    table: Table[Any]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class PictureFile:
    """A picture under ``plots/``, named by its file's stem; Markdown only."""

    stem: str
    caption: str
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True)
class PictureCaption:
    """Text below a picture; Markdown only (a chart on the HTML page has a caption of its own)."""

    lines: Sequence[str]
    kind: ClassVar[str] = "caption"


@dataclass(frozen=True)
class ArmLegend:
    """Every arm's name and its mark (an ``<svg>`` element); HTML only."""

    marks: tuple[tuple[str, str], ...]
    kind: ClassVar[str] = "legend"


@dataclass(frozen=True)
class ChartPart:
    """A chart (an ``<svg>`` element); HTML only."""

    svg: str
    caption: str = ""
    kind: ClassVar[str] = "chart"


@dataclass(frozen=True)
class TimelinePart:
    """Charts of memory and of request phases on one time axis; HTML only.

    ``lines`` holds every memory series' name and style class, ``phases`` the names of the phases.
    """

    charts: Sequence[str]
    lines: Sequence[tuple[str, str]]
    phases: Sequence[str]
    caption: str
    kind: ClassVar[str] = "timeline"


@dataclass(frozen=True)
class RunList:
    """The verdicts of every row of a cell as sentences, with links to its runs; HTML only."""

    rows: Sequence[Json]
    sentences: Sequence[Sequence[str]]
    kind: ClassVar[str] = "runs"


@dataclass(frozen=True)
class StepPlayer:
    """The player of traced steps, an HTML element with its script; HTML only."""

    html: str
    kind: ClassVar[str] = "step_player"


Part = (
    Prose
    | BulletList
    | TablePart
    | PictureFile
    | PictureCaption
    | ArmLegend
    | ChartPart
    | TimelinePart
    | RunList
    | StepPlayer
)
Parts = Sequence[Part]


@dataclass(frozen=True)
class Section:
    """A title and a function that returns the section's parts.

    A section without parts is left out of the report.
    """

    title: str
    parts: Callable[[CellReport], Parts]


def section(title: str) -> Callable[[Callable[[CellReport], Iterable[Part]]], Section]:
    """Return a decorator that turns a function of a report into a :class:`Section`.

    The function returns the section's parts.
    """

    def declare(parts: Callable[[CellReport], Iterable[Part]]) -> Section:
        return Section(title, lambda report: list(parts(report)))

    return declare


def table_parts(*tables: Table[Any] | None) -> Parts:
    """Return the tables as parts. Tables that are None or have no lines are left out."""
    return [TablePart(table) for table in tables if table is not None and table.lines]
