"""``report.md``: a study in Markdown: the answer, the article's table, what weakens it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.load_curve import curves
from labkit.analysis.rendering.sections import (
    DOCUMENT,
    Bullets,
    Caption,
    CellReport,
    Part,
    Picture,
    Prose,
    Tabular,
)
from labkit.analysis.rendering.tables import Table, cells_table
from labkit.analysis.rendering.traffic_tables import LOAD_STEM, load_table


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
    if len(analyses) > 1:
        parts += [markdown_table(cells_table(study)), ""]
    loads = load_table(curves(analyses))
    if loads is not None:
        title = "## Throughput against latency"
        parts += [title, "", markdown_table(loads), "", *loads.notes, ""]
        parts += [f"![Throughput against latency](plots/{LOAD_STEM}.png)", ""]
    for analysis in analyses:
        parts += _cell(CellReport(analysis))
    return "\n".join(parts).rstrip() + "\n"


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
