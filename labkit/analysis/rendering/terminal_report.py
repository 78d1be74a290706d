"""A cell in the terminal: the answer, the table, what weakens it, where the report is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.number_format import (
    count_text,
    interval_text,
    p_text,
    percent_text,
    value_text,
)
from labkit.analysis.rendering.report_sections import CellReport
from labkit.analysis.rendering.results_table import ResultLine, verdict_text
from labkit.analysis.rendering.tables import Column, Table
from labkit.analysis.study_analysis import AnalysisCache

if TYPE_CHECKING:
    from rich.console import Console

    from labkit.analysis.study_diff import RowChange, StudyComparison

STYLES = {
    "faster": "bold green",
    "slower": "bold red",
    "equivalent": "cyan",
    "trivial": "cyan",
    "inconclusive": "yellow",
    "estimate_only": "yellow",
    "invalid": "bold white on red",
    "not_comparable": "dim",
}
PIPED_WIDTH = 100  # in a log or a pipe nothing says how wide a line may be


def print_cell(
    cell_dir: Path, console: Console | None = None, analysis_cache: AnalysisCache | None = None
) -> None:
    """Print one cell from its records: the answer, the table, what weakens it, the design.

    ``analysis_cache``: who may have analysed it already. Raises ``RecordError``.
    """
    from rich.console import Console
    from rich.text import Text

    report = CellReport((analysis_cache or AnalysisCache()).cell(Path(cell_dir)))
    out = console or Console()
    if console is None and not out.is_terminal:
        out.width = PIPED_WIDTH
    out.print()
    out.print(Text(report.title))
    out.print(Text(report.answer, style="bold"))
    for table in (report.results, report.secondary):
        if table.lines or table is report.results:
            out.print(_rich(table, out.width))
    for note in report.notes:
        out.print(Text(note, style="dim"))
    for line in report.caveats:
        out.print(Text(f"! {line}", style="yellow"))
    out.print(Text(_subtitle(report), style="dim"))
    where = report.analysis.data.dir.parent / "report.md"
    out.print(Text(f"report: {where}", style="dim"), soft_wrap=True)  # whole, to be copied


def _subtitle(report: CellReport) -> str:
    design = report.cell["design"]
    return (
        f"{report.cell['cell']}: {count_text(design['blocks'], 'block')} of "
        f"{count_text(design['runs_per_block'], 'run')} per arm, "
        f"margin ±{design['margin_pct']:g} %; gates: {report.gates}"
    )


def _rich(table: Table[ResultLine], width: int) -> Any:
    """Build the table; on narrow terminals what can be done without is left out."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    kept = [column for column in table.columns if width >= column.least_width]
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in kept:
        shown.add_column(
            Text(_heading(column)),
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
        )
    last = None
    for line in table.lines:
        cells = [
            Text("" if line.index == last and column.once else _compact(column, line))
            for column in kept
        ]
        for column, cell in zip(kept, cells, strict=True):
            if column.verdict:
                cell.stylize(STYLES.get(line.verdict or "", "dim"))
        shown.add_row(*cells)
        last = line.index
    return shown


def _heading(column: Column[ResultLine]) -> str:
    """Break a heading where a name has joints, so that it is no wider than its numbers."""
    name = column.heading
    if column.short is not None:
        return column.short
    return re.sub(r"([_-])(?=\w)", r"\1\n", name.replace(" (", "\n(")) if len(name) > 10 else name


def _compact(column: Column[ResultLine], line: ResultLine) -> str:
    """Shorten a cell: the heading has the unit, what weakens the table the reason."""
    text = column.text(line)
    if column.verdict:
        return text.partition(":")[0]
    return text.replace("%", "").replace(" to ", ", ") if column.number else text


def print_changes(found: StudyComparison, out: Console) -> None:
    """Print what changed between two studies: weaknesses, then a line per row and arm."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    for line in found.caveats:
        out.print(Text(f"! {line}", style="yellow"))
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in CHANGES:
        shown.add_column(
            column.heading,
            justify="right" if column.number else "left",
            no_wrap=column.number or column.verdict,
            overflow="fold",
        )
    for change in found.changes:
        style = STYLES[change.verdict.word]
        shown.add_row(*(Text(c.text(change), style=style if c.verdict else "") for c in CHANGES))
    out.print(shown)
    for line in found.notes:
        out.print(Text(line, style="dim"))
    for words, rows in _reasons(found.changes).items():
        where = rows[0] if len(rows) == 1 else count_text(len(rows), "row")
        out.print(Text(f"{where}: {words}"))


def _reasons(changes: Sequence[RowChange]) -> dict[str, list[str]]:
    """Gather the rows under each reason, in the order in which reasons first appear."""
    found: dict[str, list[str]] = {}
    for change in changes:
        if change.verdict.reason is not None:
            words = f"{_change_word(change)}: {change.verdict.reason}"
            found.setdefault(words, []).append(f"{_change_name(change)}, {change.arm}")
    return found


def _change_word(change: RowChange) -> str:
    word = change.verdict.word
    return "not comparable in time" if word == "not_comparable" else verdict_text(word)


def _change_name(change: RowChange) -> str:
    return str(change.row.metric) if change.row.case == "all" else change.row.case


def _compared(key: str) -> Callable[[RowChange], Any]:
    """Return a column's value: a field of the comparison; None where there is none."""
    return lambda change: None if change.comparison is None else getattr(change.comparison, key)


def _measured(key: str) -> Callable[[RowChange], str]:
    return lambda change: value_text(getattr(change, key), change.row.unit)


CHANGES: tuple[Column[RowChange], ...] = (
    Column("row", _change_name, number=False),
    Column("arm", lambda change: change.arm, number=False),
    Column("old", _measured("old")),
    Column("new", _measured("new")),
    Column("change\n%", _compared("effect_pct"), lambda pct: percent_text(pct).rstrip("%")),
    Column(
        "adjusted\nCI %",
        _compared("ci_pct"),
        lambda ci: interval_text(*(ci or (None, None))).replace(" to ", ", "),
    ),
    Column("adjusted\np", _compared("p_adjusted"), p_text),
    Column("verdict", _change_word, number=False, verdict=True),
)
