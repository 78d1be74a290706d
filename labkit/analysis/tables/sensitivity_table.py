"""The table of sensitivity analyses: a line for each row, arm and analysis."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.number_format import interval_text, p_text, percent_text
from labkit.analysis.robustness.sensitivity_analysis import SensitivityResult


def sensitivity_table(cell: Cell, results: Sequence[SensitivityResult]) -> Table[SensitivityResult]:
    """Return one line per sensitivity analysis of a row and arm."""
    columns: tuple[Column[SensitivityResult], ...] = (
        Column("row", lambda result: cell.row_name(cell.rows[result.row]), numeric=False),
        Column("arm", lambda result: result.arm, numeric=False),
        Column("analysis", lambda result: result.how, numeric=False),
        Column("delta", lambda result: result.effect_pct, percent_text),
        Column(
            "unadjusted CI (%)",
            lambda result: result.ci_pct or (None, None),
            lambda ci: interval_text(*ci),
        ),
        Column("unadjusted p", lambda result: result.p, p_text),
        Column("blocks", lambda result: result.blocks),
    )
    note = (
        "Each analysis tests one row by itself: neither p nor interval is adjusted for the other "
        "rows or arms. The numbers above are not these, but a verdict is withheld where stalls or "
        "the mean of all launches contradict it."
    )
    return Table(columns, tuple(results), (note,), prose=True)
