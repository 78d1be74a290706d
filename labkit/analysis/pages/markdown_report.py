"""``report.md``: a study in Markdown: answers, results, caveats and details."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from labkit.analysis.document.report_parts import (
    BulletList,
    PictureFile,
    Prose,
    ReportPart,
    TablePart,
)
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.pages.report_sections import MARKDOWN_SECTIONS
from labkit.analysis.pages.study_overview import MachineOverview, machine_overviews
from labkit.analysis.studies.cell_summary import CellSummary, cell_headings
from labkit.analysis.studies.study_answer_sentence import study_answer, study_question
from labkit.analysis.text_format import markdown_text


def markdown_table(table: Table[Any]) -> str:
    """Return a table in GitHub's Markdown."""
    headings = [column.heading for column in table.columns]
    alignment = ["---:" if column.numeric else "---" for column in table.columns]
    cells = ([_cell(column, line) for column in table.columns] for line in table.lines)
    lines = [[*map(_escaped, headings)], alignment, *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_html(text: str, pictures: bool = True) -> str:
    """Return Markdown as HTML; HTML in it is shown as text.

    ``pictures``: False for texts of others, whose pictures are not loaded.
    """
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    return str((markdown if pictures else markdown.disable("image")).render(text))


def _cell(column: Column[Any], line: Any) -> str:
    text = column.text(line)
    return _code_span(text) if column.verbatim else _escaped(text)


def _escaped(text: str) -> str:
    return markdown_text(_in_one_cell(text))


def _code_span(text: str) -> str:
    """Return a text as code, in which Markdown and HTML have no meaning."""
    if not text:
        return ""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    # A renderer strips one space at both ends, if there is one at both.
    pad = " " if text.strip() and {text[0], text[-1]} & {*" `"} else ""
    return f"{fence}{pad}{_in_one_cell(text)}{pad}{fence}"


def _in_one_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def study_markdown(
    cells: Sequence[CellSummary], reports: Sequence[CellReport], note: str = ""
) -> str:
    """Return the Markdown report of a study. Links to pictures are relative to its folder.

    ``reports``: the cells that are shown in full, all or none. ``note``: where the others are.
    """
    question, answer = study_question(cells), study_answer(cells)
    lines = [f"# {markdown_text(question)}", "", f"**{markdown_text(answer)}**", ""]
    lines += [note, ""] if note else []
    for overview in machine_overviews(cells):
        lines += _overview_lines(overview)
    for report, heading in zip(reports, cell_headings(cells), strict=False):
        if len(cells) > 1:
            short = markdown_text(report.short_answer)
            lines += [f"## {markdown_text(heading)}", "", f"**{short}**", ""]
        lines += _cell_lines(report)
    return "\n".join(lines).rstrip() + "\n"


def _overview_lines(overview: MachineOverview) -> Iterator[str]:
    if overview.machine is not None:
        yield from (f"## {overview.machine}", "")
    if overview.cells is not None:
        yield from _part_lines(TablePart(overview.cells))
    if (capacity := overview.capacity) is not None:
        sentences = (markdown_text(one.sentence) for one in overview.capacities)
        yield from ("## Capacity", "", *(f"**{text}**\n" for text in sentences))
        yield from _part_lines(TablePart(capacity))
    if (loads := overview.loads) is not None:
        title = "Throughput against latency"
        yield from (f"## {title}", "", markdown_table(loads), "")
        yield from (*map(markdown_text, loads.notes), "")
        yield from (f"![{title}](plots/{overview.stem}.png)", "")


def _cell_lines(report: CellReport) -> Iterator[str]:
    if report.answer != report.short_answer:
        yield from (markdown_text(report.answer), "")
    for settings in report.settings:
        yield from _part_lines(TablePart(settings))
    yield from (markdown_table(report.results), "") if report.results.lines else ()
    yield from (line for note in report.notes for line in (markdown_text(note), ""))
    for heading, lines in (
        ("What could change the answer:", report.caveats.could_change),
        ("For the record:", report.caveats.for_the_record),
    ):
        if lines:
            yield from (heading, "", *(f"- {markdown_text(line)}" for line in lines), "")
    for section in MARKDOWN_SECTIONS:
        parts = section.parts(report)
        yield from (f"### {section.title}", "") if parts else ()
        for part in parts:
            yield from _part_lines(part)


def _part_lines(part: ReportPart) -> Sequence[str]:
    """Return the lines of a section's part; empty for a part that only the HTML page shows."""
    match part:
        case Prose():
            return [*map(markdown_text, part.lines), ""]
        case BulletList():
            return [*(f"- {markdown_text(line)}" for line in part.lines), ""]
        case TablePart():
            notes = [line for note in part.table.notes for line in (markdown_text(note), "")]
            return [markdown_table(part.table), "", *notes]
        case PictureFile():
            text = [f"{markdown_text(part.caption)}.", ""] if part.captioned else []
            return [f"![{part.caption}](plots/{part.stem}.png)", "", *text]
    return []
