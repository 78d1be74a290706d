"""Each arm's own median and quartiles in every row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.analysis.document.report_parts import Parts, section, table_parts
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.findings.verdict_sentences import row_name
from labkit.analysis.number_format import unit_name, value_text

if TYPE_CHECKING:
    from labkit.analysis.pages.cell_report_content import CellReport

Json = Mapping[str, Any]
MEDIANS_TITLE = "Medians and quartiles"


@dataclass(frozen=True)
class ArmInRow:
    """An arm in one row of the cell: its summary and its comparison (empty for the baseline)."""

    row: Json
    arm: str
    summary: Json
    comparison: Json


def medians_table(cell: Json) -> Table[ArmInRow]:
    """Return every arm's own median and quartiles in every row. Primary rows come first."""
    lines = [
        ArmInRow(row, arm, summary, comparisons.get(arm, {}))
        for row in sorted(cell["rows"], key=lambda row: not row["primary"])
        if row["skipped"] is None
        for comparisons in [{c["arm"]: c for c in row["comparisons"]}]
        for arm, summary in row["arms"].items()
    ]

    metrics = {line.row["metric"] for line in lines if line.row["case"] != "all"}

    def name(line: ArmInRow) -> str:
        case, metric = line.row["case"], line.row["metric"]
        return f"{case}: {metric}" if len(metrics) > 1 and case != "all" else row_name(line.row)

    def quantile(key: str) -> Callable[[ArmInRow], str]:
        return lambda line: value_text(line.summary[key], line.row["unit"])

    def wins(line: ArmInRow) -> str | None:
        count = line.comparison.get("wins")
        return None if count is None else f"{count} of {line.comparison['blocks']}"

    columns: tuple[Column[ArmInRow], ...] = (
        Column("row", name, numeric=False),
        Column("arm", lambda line: line.arm, numeric=False),
        Column("unit", lambda line: unit_name(line.row["unit"]), numeric=False),
        *(Column(key, quantile(key)) for key in ("median", "q1", "q3")),
        Column("runs", lambda line: line.summary["n"]),
        Column("blocks won", wins),
        Column(
            "detectable effect",
            lambda line: line.comparison.get("mde_pct"),
            lambda pct: "" if pct is None else f"{pct:.1f}%",
        ),
    )
    return Table(columns, tuple(lines))


@section(MEDIANS_TITLE)
def medians_section(report: CellReport) -> Parts:
    """Show every arm's own median and quartiles."""
    return table_parts(medians_table(report.cell))
