"""A cell in the terminal: the answer, the table, what weakens it, where the report is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.analysis.answer import answer
from labkit.analysis.caveats import weaknesses
from labkit.analysis.confirmation import confirmation_sentence
from labkit.analysis.formatting import count, interval_text, p_text, percent_text, value_text
from labkit.analysis.rendering.tables import Column, Table, cell_table, verdict_text
from labkit.analysis.sentences import control_sentence
from labkit.analysis.study_analysis import Analyst

if TYPE_CHECKING:
    from rich.console import Console

    from labkit.analysis.study_diff import Changed, Comparisons

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
WIDE, WIDER = 92, 110
PIPED_WIDTH = 100  # in a log or a pipe nothing says how wide a line may be


def print_cell(
    cell_dir: Path, console: Console | None = None, analyst: Analyst | None = None
) -> None:
    """Print one cell from its records: the answer, the table, what weakens it, the design.

    ``analyst``: who may have analysed it already. Raises ``RecordError``.
    """
    from rich.console import Console
    from rich.text import Text

    analysis = (analyst or Analyst()).cell(Path(cell_dir))
    out = console or Console()
    if console is None and not out.is_terminal:
        out.width = PIPED_WIDTH
    cell = analysis.json
    out.print()
    out.print(Text(cell["question"] or cell["cell"]))
    out.print(Text(answer(analysis), style="bold"))
    table = cell_table(cell, analysis.data.records)
    out.print(_rich(table, out.width))
    secondary = cell_table(cell, analysis.data.records, primary=False)
    if secondary.lines:
        out.print(_rich(secondary, out.width))
    for note in (*table.notes, control_sentence(cell), confirmation_sentence(analysis)):
        if note:
            out.print(Text(note, style="dim"))
    for line in weaknesses(analysis):
        out.print(Text(f"! {line}", style="yellow"))
    out.print(Text(_subtitle(cell), style="dim"))
    where = analysis.data.dir.parent / "report.md"
    out.print(Text(f"report: {where}", style="dim"), soft_wrap=True)  # whole, to be copied


def gates_line(cell: Any) -> str:
    """Give the gates on one line: ``healthy pass, engaged pass, identical unclaimed``."""
    return ", ".join(f"{name} {gate['status']}" for name, gate in cell["gates"].items())


def _subtitle(cell: Any) -> str:
    design = cell["design"]
    return (
        f"{cell['cell']}: {count(design['blocks'], 'block')} of "
        f"{count(design['runs_per_block'], 'run')} per arm, "
        f"margin ±{design['margin_pct']:g} %; gates: {gates_line(cell)}"
    )


def _rich(table: Table, width: int) -> Any:
    """Build the table; on narrow terminals what can be done without is left out."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    kept = [i for i, column in enumerate(table.columns) if width >= WIDE or not column.extra]
    if width < WIDER and any(column.name == "arm" for column in table.columns):
        kept = [i for i in kept if table.columns[i].name != "kernel"]
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i in kept:
        column = table.columns[i]
        shown.add_column(
            Text(_heading(column.name)),
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
        )
    last = None
    for line in table.lines:
        style = STYLES.get(line.verdict or "", "dim")
        cells = [
            Text("" if line.row == last and table.columns[i].row else text)
            for i in kept
            for text in [_compact(table.columns[i], line.cells[i])]
        ]
        last = line.row
        for i, cell in zip(kept, cells, strict=True):
            if table.columns[i].name == "verdict":
                cell.stylize(style)
        shown.add_row(*cells)
    return shown


def _heading(name: str) -> str:
    """Break a heading where a name has joints, so that it is no wider than its numbers."""
    if name.startswith("adjusted "):
        return name.replace(" (%)", ", %").replace("adjusted ", "adjusted\n")
    if name in ("delta", "published"):
        return name.replace("published", "publ.") + "\n%"
    return re.sub(r"([_-])(?=\w)", r"\1\n", name.replace(" (", "\n(")) if len(name) > 10 else name


def _compact(column: Column, text: str) -> str:
    """Shorten a text cell: the heading has the unit, what weakens the table the reason."""
    if column.name == "verdict":
        return text.partition(":")[0]
    if column.number:
        return text.replace("%", "").replace(" to ", ", ")
    return text


def print_changes(found: Comparisons, out: Console) -> None:
    """Print what changed between two studies: weaknesses, then a line per row and arm."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    for line in found.weaknesses:
        out.print(Text(f"! {line}", style="yellow"))
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    numbers = ("old", "new", "change\n%", "adjusted\nCI %", "adjusted\np")
    for name in ("row", "arm", *numbers, "verdict"):
        right, fixed = name in numbers, name not in ("row", "arm")
        shown.add_column(name, justify="right" if right else "left", no_wrap=fixed, overflow="fold")
    for change in found.changes:
        row, c = change.row, change.found
        low, high = (c.ci_pct if c is not None else None) or (None, None)
        shown.add_row(
            Text(_change_name(change)),
            Text(change.arm),
            value_text(change.old, row.unit),
            value_text(change.new, row.unit),
            percent_text(c.effect_pct if c is not None else None).rstrip("%"),
            interval_text(low, high).replace(" to ", ", "),
            p_text(c.p_adjusted if c is not None else None),
            Text(_change_word(change), style=STYLES[change.verdict.word]),
        )
    out.print(shown)
    for line in found.notes:
        out.print(Text(line, style="dim"))
    for words, rows in _reasons(found.changes).items():
        where = rows[0] if len(rows) == 1 else count(len(rows), "row")
        out.print(Text(f"{where}: {words}"))


def _reasons(changes: Sequence[Changed]) -> dict[str, list[str]]:
    """Gather the rows under each reason, in the order in which reasons first appear."""
    found: dict[str, list[str]] = {}
    for change in changes:
        if change.verdict.reason is not None:
            words = f"{_change_word(change)}: {change.verdict.reason}"
            found.setdefault(words, []).append(f"{_change_name(change)}, {change.arm}")
    return found


def _change_word(change: Changed) -> str:
    word = change.verdict.word
    return "not comparable in time" if word == "not_comparable" else verdict_text(word)


def _change_name(change: Changed) -> str:
    return str(change.row.metric) if change.row.case == "all" else change.row.case
