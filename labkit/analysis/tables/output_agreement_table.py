"""The number of each arm's outputs that agree with the reference run's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.analysis.comparison.output_identity import IdentityReport, OutputAgreement
from labkit.analysis.document.report_parts import Parts, section, table_parts
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell
from labkit.records import Record

if TYPE_CHECKING:
    from labkit.analysis.pages.cell_report_content import CellReport


def output_noun(cell: Cell, records: Sequence[Record]) -> str:
    """Return the noun for the outputs that are counted.

    It is requests, picks (of frames), token rows of a kernel, or scored tokens.
    """
    if any("scoring" in case.notes for record in records for case in record.cases):
        return "scored tokens"
    if any(row.metric == "decode_ms" for row in cell.rows):
        return "picks"
    return "requests" if all(row.case == "all" for row in cell.rows) else "token rows"


def agreement_table(report: IdentityReport, noun: str) -> Table[OutputAgreement] | None:
    """Return the number of every arm's outputs that agree with the reference run's.

    ``noun``: plural noun for the outputs (:func:`output_noun`). None if nothing was compared.
    """
    agreements = [agreement for agreement in report.agreement if agreement.total]
    if not agreements:
        return None

    def first_difference(agreement: OutputAgreement) -> str:
        first = report.first(agreement.arm)
        return "none" if first is None else f"{first.case}: {first.where}; {first.run}"

    columns: tuple[Column[OutputAgreement], ...] = (
        Column("arm", lambda a: a.arm, numeric=False),
        Column(f"{noun} that agree in every run", lambda a: f"{a.agree:,} of {a.total:,}"),
        Column("agreeing prefix", lambda a: a.prefix, "{:.1%}".format),
        Column("first difference", first_difference, numeric=False),
    )
    return Table(columns, tuple(agreements), (f"Compared with run {report.reference}.",))


@section("Outputs")
def outputs_section(report: CellReport) -> Parts:
    """Show the number of outputs that agree with the reference run's."""
    noun = output_noun(report.cell, report.records)
    return table_parts(agreement_table(report.analysis.identity, noun))
