"""The report of a cell, and the comparison of two studies, as printed in the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from labkit.analysis.document.table_model import Column, Table, broken_name
from labkit.analysis.number_format import interval_text, p_text, percent_text, value_text
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.analysis.tables.results_table import ResultLine
from labkit.analysis.tables.sweep_tables import BEST, Values
from labkit.config import count_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from labkit.analysis.studies.between_study_comparison import RowChange, StudyComparison

VERDICT_STYLES = {
    "better": "bold green",
    "worse": "bold red",
    "equivalent": "cyan",
    "trivial": "cyan",
    "inconclusive": "yellow",
    "estimate_only": "yellow",
    "computed": "cyan",
    "invalid": "bold white on red",
    "not_comparable": "dim",
}
PIPED_WIDTH = 100  # characters per line if the output is not a terminal
GAP = 2  # characters that rich puts between columns, and in all at both ends
INDENT = "  "  # of the cells of a record


def print_cell(
    cell_dir: Path, console: Console | None = None, analysis_cache: AnalysisCache | None = None
) -> None:
    """Print one cell: its question, answer, results, notes, caveats and design.

    ``console``: where to print; None: standard output. ``analysis_cache``: reused if the cell's
    analysis is there. Raises ``RecordError`` if a file of the cell is not valid.
    """
    from rich.console import Console
    from rich.text import Text

    report = CellReport((analysis_cache or AnalysisCache()).cell(Path(cell_dir)))
    out = console or Console()
    if console is None and not out.is_terminal:
        out.width = PIPED_WIDTH

    def say(lines: Iterable[str], style: str = "dim") -> None:
        for line in lines:
            out.print(Text(line, style=style))

    out.print()
    say([report.cell.title], "")
    say([report.short_answer], "bold")
    say([report.answer] if report.answer != report.short_answer else [], "")
    for settings in report.settings:
        out.print(_rich_settings(settings, out.width))
        say(settings.notes)
    for table in () if report.settings else (report.results, report.secondary_results):
        if table.lines:
            out.print(_rich_table(table, out.width))
    hidden = report.results.notes if report.settings else ()
    say(note for note in report.notes if note not in hidden)
    say((f"! {line}" for line in report.caveats.could_change), "yellow")
    say(f"- {line}" for line in report.caveats.for_the_record)
    design = report.cell.design
    blocks, runs = count_text(design.blocks, "block"), count_text(design.runs_per_block, "run")
    size = f"{blocks} of {runs} per arm, margin ±{design.margin_pct:g} %"
    say([f"{report.cell.name}: {size}; gates: {report.gates}"])
    path = report.analysis.data.dir.parent / "report.md"
    out.print(Text(f"report: {path}", style="dim"), soft_wrap=True)  # one line, to be copied


def _rich_settings(table: Table[Values], width: int) -> RenderableType:
    from rich.text import Text

    columns = [TerminalColumn(c.heading, c.heading, c.numeric) for c in table.columns]
    rows = [list(map(Text, table.cells(line))) for line in table.lines]
    for cell in (cell for row in rows for cell in row):
        cell.stylize("bold green" if cell.plain.endswith(f" {BEST}") else "")
    return terminal_table(columns, rows, width)


def _rich_table(table: Table[ResultLine], width: int) -> RenderableType:
    from rich.text import Text

    columns = [column for column in table.columns if width >= column.min_width]
    rows, previous_row = [], None
    for line in table.lines:
        hidden = line.row_index == previous_row
        cells = [Text("" if hidden and c.once_per_row else _short_text(c, line)) for c in columns]
        for column, cell in zip(columns, cells, strict=True):
            if column.is_verdict:
                cell.stylize(VERDICT_STYLES.get(line.verdict or "", "dim"))
        rows.append(cells)
        previous_row = line.row_index
    headings = [TerminalColumn(_short_heading(c), c.heading, c.numeric) for c in columns]
    return terminal_table(headings, rows, width)


def _short_heading(column: Column[ResultLine]) -> str:
    """Return a heading broken into lines about as wide as the column's numbers."""
    if column.short_heading is not None:
        return column.short_heading
    name, parenthesis, unit = column.heading.partition(" (")
    return broken_name(name) + (f"\n({unit}" if parenthesis else "")


def _short_text(column: Column[ResultLine], line: ResultLine) -> str:
    """Return a cell's text without its unit, which is in the heading, and without a reason."""
    text = column.text(line)
    if column.is_verdict:
        # In one word, because columns are narrow.
        return line.verdict.replace("_", "-") if line.verdict else text.partition(":")[0]
    return re.sub("(?<! )%", "", text).replace(" to ", ", ") if column.numeric else text


def print_changes(comparison: StudyComparison, out: Console) -> None:
    """Print the changes between two studies: caveats, then one line per row and arm."""
    from rich.text import Text

    for line in comparison.caveats:
        out.print(Text(f"! {line}", style="yellow"))
    several = len({change.cell for change in comparison.changes}) > 1
    shown = (CELL_COLUMN, *CHANGE_COLUMNS) if several else CHANGE_COLUMNS
    columns = [column for column in shown if out.width >= column.min_width]
    lines = []
    for change in comparison.changes:
        style = VERDICT_STYLES[change.comparison.verdict]
        lines.append([Text(c.text(change), style=style if c.is_verdict else "") for c in columns])
    headings = [TerminalColumn(c.heading, c.heading.replace("\n", " "), c.numeric) for c in columns]
    out.print(terminal_table(headings, lines, out.width))
    for line in comparison.notes:
        out.print(Text(line, style="dim"))
    for reason, rows in _rows_by_reason(comparison.changes).items():
        subject = rows[0] if len(rows) == 1 else count_text(len(rows), "row")
        out.print(Text(f"{subject}: {reason}"))


def _rows_by_reason(changes: Sequence[RowChange]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    for change in changes:
        if change.comparison.reason is not None:
            reason = f"{_change_verdict(change)}: {change.comparison.reason}"
            rows.setdefault(reason, []).append(f"{change.place}, {change.arm}")
    return rows


def _change_verdict(change: RowChange) -> str:
    word = change.comparison.verdict
    return "not comparable in time" if word == "not_comparable" else word.replace("_", "-")


def _measured(key: str) -> Callable[[RowChange], str]:
    return lambda change: value_text(getattr(change, key), change.row.unit)


CELL_COLUMN: Column[RowChange] = Column("cell", lambda change: change.cell, numeric=False)
CHANGE_COLUMNS: tuple[Column[RowChange], ...] = (
    Column("row", lambda change: change.name, numeric=False),
    Column("arm", lambda change: change.arm, numeric=False),
    Column("old", _measured("old"), min_width=100),
    Column("new", _measured("new"), min_width=100),
    Column(
        "change\n%", attrgetter("comparison.effect_pct"), lambda pct: percent_text(pct).rstrip("%")
    ),
    Column(
        "adjusted\nCI %",
        attrgetter("comparison.ci_pct"),
        lambda ci: interval_text(*(ci or (None, None))).replace(" to ", ", "),
    ),
    Column("adjusted\np", attrgetter("comparison.p_adjusted"), p_text),
    Column("verdict", _change_verdict, numeric=False, is_verdict=True),
)


@dataclass(frozen=True)
class TerminalColumn:
    """A column: its heading in a table, its heading in a record, and its kind.

    Cells of a ``numeric`` column are right-aligned and never wrapped. Others wrap between words.
    """

    heading: str
    name: str
    numeric: bool

    def min_width(self, cells: Sequence[Text]) -> int:
        """Return the width of the longest word or, in a numeric column, of the longest cell."""
        parts = self.heading.split("\n")
        for cell in cells:
            parts += cell.plain.split("\n") if self.numeric else cell.plain.split()
        return max(map(_width, parts), default=0)

    def max_width(self, cells: Sequence[Text]) -> int:
        """Return the width in which no cell wraps."""
        lines = [line for cell in cells for line in cell.plain.split("\n")]
        return max(map(_width, [*self.heading.split("\n"), *lines]), default=0)


def terminal_table(
    columns: Sequence[TerminalColumn], rows: Sequence[Sequence[Text]], width: int
) -> RenderableType:
    """Return a table for a terminal of ``width`` characters, or records if it has no room.

    ``rows``: the cells of each line, ``[lines][columns]``. An empty first cell stands for the one
    above it.
    """
    cells = [[row[i] for row in rows] for i in range(len(columns))]
    widths = _column_widths(
        [column.min_width(own) for column, own in zip(columns, cells, strict=True)],
        [column.max_width(own) for column, own in zip(columns, cells, strict=True)],
        width - GAP * len(columns),
    )
    if widths is None:
        return _records(columns, rows)
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column, characters in zip(columns, widths, strict=True):
        justify: Literal["right", "left"] = "right" if column.numeric else "left"
        table.add_column(
            Text(column.heading), justify=justify, no_wrap=column.numeric, width=characters
        )
    for row in rows:
        table.add_row(*row)
    return table


def _column_widths(smallest: Sequence[int], largest: Sequence[int], room: int) -> list[int] | None:
    """Return columns' widths; what ``room`` is left is divided equally; None if it is too small."""
    left = room - sum(smallest)
    if left < 0:
        return None
    widths = list(smallest)
    order = sorted(range(len(widths)), key=lambda i: largest[i] - smallest[i])
    for place, i in enumerate(order):
        extra = min(largest[i] - smallest[i], left // (len(order) - place))
        widths[i] += extra
        left -= extra
    return widths


def _records(columns: Sequence[TerminalColumn], rows: Sequence[Sequence[Text]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    lines: list[Text] = []
    for first, *others in rows:
        if first.plain:
            lines += [Text(), Text.assemble((first.plain, "bold"))]
        for column, cell in zip(columns[1:], others, strict=True):
            if cell.plain:
                lines.append(Text.assemble(f"{INDENT}{column.name}: ", cell))
    return Group(*lines, Text())


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
