"""Each arm's own median and quartiles in every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.analysis.document.report_parts import Parts, section, table_parts
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.row_model import Row
from labkit.analysis.number_format import unit_name, value_text

if TYPE_CHECKING:
    from labkit.analysis.pages.cell_report_content import CellReport

RowAndArm = tuple[Row, str]
MEDIANS_TITLE = "Medians and quartiles"


def medians_table(cell: Cell) -> Table[RowAndArm]:
    """Return every arm's own median and quartiles in every row. Primary rows come first."""
    rows = sorted(cell.rows, key=lambda row: not row.primary)
    lines = tuple((row, arm) for row in rows if row.skipped is None for arm in row.arms)
    metrics = {row.metric for row, _ in lines if row.case != "all"}

    def name(line: RowAndArm) -> str:
        row, several = line[0], len(metrics) > 1 and line[0].case != "all"
        return f"{row.case}: {row.metric}" if several else row.name

    def quantile(key: str) -> Callable[[RowAndArm], str]:
        return lambda line: value_text(getattr(line[0].arms[line[1]], key), line[0].unit)

    def wins(line: RowAndArm) -> str | None:
        comparison = line[0].comparison(line[1])
        known = comparison is not None and comparison.wins is not None
        return f"{comparison.wins} of {comparison.blocks}" if comparison and known else None

    def detectable(line: RowAndArm) -> float | None:
        comparison = line[0].comparison(line[1])
        return None if comparison is None else comparison.mde_pct

    columns: tuple[Column[RowAndArm], ...] = (
        Column("row", name, numeric=False),
        Column("arm", lambda line: line[1], numeric=False),
        Column("unit", lambda line: unit_name(line[0].unit), numeric=False),
        *(Column(key, quantile(key)) for key in ("median", "q1", "q3")),
        Column("runs", lambda line: line[0].arms[line[1]].n),
        Column("blocks won", wins),
        Column("detectable effect", detectable, lambda pct: "" if pct is None else f"{pct:.1f}%"),
    )
    return Table(columns, lines)


@section(MEDIANS_TITLE)
def medians_section(report: CellReport) -> Parts:
    """Show every arm's own median and quartiles."""
    return table_parts(medians_table(report.cell))
