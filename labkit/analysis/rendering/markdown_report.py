"""``report.md``: a study in Markdown: the answer, the article's table, what weakens it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.rendering.report_sections import (
    DOCUMENT,
    Bullets,
    Caption,
    CellReport,
    Part,
    Picture,
    Prose,
    Tabular,
)
from labkit.analysis.rendering.study_overview import Overview, overviews
from labkit.analysis.rendering.tables import Table


def markdown_table(table: Table[Any]) -> str:
    """Write a table in Markdown (GitHub's pipes)."""
    head = [column.heading for column in table.columns]
    rule = ["---:" if column.number else "---" for column in table.columns]
    lines = [head, rule, *map(table.cells, table.lines)]
    return "\n".join("| " + " | ".join(_escaped(c) for c in cells) + " |" for cells in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def study_markdown(study: Mapping[str, Any], analyses: Sequence[CellAnalysis]) -> str:
    """Write the whole report; pictures are linked relative to the study."""
    parts = [f"# {study['study']}", ""]
    for overview in overviews(study, analyses):
        parts += _overview(overview)
    for analysis in analyses:
        parts += _cell(CellReport(analysis))
    return "\n".join(parts).rstrip() + "\n"


def _overview(found: Overview) -> Iterator[str]:
    if found.machine is not None:
        yield from (f"## {found.machine}", "")
    if found.cells is not None:
        yield from (markdown_table(found.cells), "")
    loads = found.loads
    if loads is not None:
        yield from ("## Throughput against latency", "", markdown_table(loads), "")
        yield from (*loads.notes, "", f"![Throughput against latency](plots/{found.stem}.png)", "")


def _cell(report: CellReport) -> Iterator[str]:
    yield from (f"## {report.title}", "", f"**{report.answer}**", "")
    yield from (markdown_table(report.results), "")
    for note in report.notes:
        yield from (note, "")
    if report.caveats:
        yield from ("What weakens this result:", "", *(f"- {x}" for x in report.caveats), "")
    for section in DOCUMENT:
        parts = section.parts(report)
        yield from (f"### {section.title}", "") if parts else ()
        for part in parts:
            yield from _part(part)


def _part(part: Part) -> Sequence[str]:
    """Write a part of a section; nothing for what only the page shows."""
    match part:
        case Prose() | Caption():
            return [*part.lines, ""]
        case Bullets():
            return [*(f"- {line}" for line in part.lines), ""]
        case Tabular():
            notes = [line for note in part.table.notes for line in (note, "")]
            return [markdown_table(part.table), "", *notes]
        case Picture():
            return [f"![{part.caption}](plots/{part.stem}.png)", ""]
    return []
