"""The gates of a cell with their reasons: what must hold before a verdict may be given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.analysis.document.report_parts import Parts, section, table_parts
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell, GateResult

if TYPE_CHECKING:
    from labkit.analysis.pages.cell_report_content import CellReport

MEANINGS = {
    "healthy": "every run ended well, on a machine that stayed the same",
    "engaged": "every arm ran the path that it claims",
    "identical": "the arms' outputs agree as claimed",
}


def gates_table(cell: Cell) -> Table[tuple[str, GateResult]]:
    """Return every gate with its meaning, its status and the reasons for it."""
    columns: tuple[Column[tuple[str, GateResult]], ...] = (
        Column("gate", lambda gate: gate[0], numeric=False),
        Column("status", lambda gate: gate[1].status, numeric=False),
        Column("holds if", lambda gate: MEANINGS.get(gate[0]), numeric=False),
        Column("reasons", lambda gate: "; ".join(gate[1].reasons), numeric=False),
    )
    return Table(columns, tuple(cell.gates.items()), prose=True)


@section("Gates")
def gates_section(report: CellReport) -> Parts:
    """Show the gates."""
    return table_parts(gates_table(report.cell))
