"""Tables of a cell's sensitivity analyses and of its failed runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.analysis.number_format import interval_text, p_text, percent_text
from labkit.analysis.rendering.report_parts import Parts, section, table_parts
from labkit.analysis.rendering.table_model import Column, Table
from labkit.analysis.sensitivity_analysis import SensitivityResult
from labkit.analysis.verdict_sentences import row_name

if TYPE_CHECKING:
    from labkit.analysis.rendering.cell_report_content import CellReport

Json = Mapping[str, Any]


def sensitivity_table(cell: Json, results: Sequence[SensitivityResult]) -> Table[SensitivityResult]:
    """Return one line per sensitivity analysis of a row and arm."""
    columns: tuple[Column[SensitivityResult], ...] = (
        Column("row", lambda result: row_name(cell["rows"][result.row]), numeric=False),
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
        "Each analysis tests one row by itself, without adjustment for the other rows. "
        "The verdicts above do not use these numbers."
    )
    return Table(columns, tuple(results), (note,), prose=True)


def failures_table(cell: Json, record_folder: str = "") -> Table[Json]:
    """Return the failed runs, linked to their records."""

    def link(failure: Json) -> str:
        return f"{record_folder}runs/{failure['run']}.json"

    columns: tuple[Column[Json], ...] = (
        Column("run", lambda failure: failure["run"], numeric=False, link=link),
        Column("outcome", lambda failure: failure["outcome"], numeric=False),
        Column("detail", lambda failure: failure["detail"], str, numeric=False),
    )
    return Table(columns, tuple(cell["failures"]))


@section("Failed runs")
def failures_section(report: CellReport) -> Parts:
    """Show the failed runs."""
    return table_parts(failures_table(report.cell, report.record_folder))
