"""What a result rests on: gates, agreement of outputs, and failed runs."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.analysis.comparison.output_identity import IdentityReport, OutputAgreement
from labkit.analysis.document.report_parts import (
    CellSource,
    Parts,
    section,
    table_parts,
    table_section,
)
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import Cell, Failure, GateResult
from labkit.analysis.number_format import share_pct_text
from labkit.records import Record

MEANINGS = {
    "healthy": "every run ended well, on a machine that stayed the same",
    "engaged": "every arm ran the path that it claims",
    "identical": "the arms' outputs agree as claimed",
}
MAX_SHOWN_LOST = 6


def gates_table(cell: Cell) -> Table[tuple[str, GateResult]]:
    """Return every gate with its meaning, its status and the reasons for it."""
    columns: tuple[Column[tuple[str, GateResult]], ...] = (
        Column("gate", lambda gate: gate[0], numeric=False),
        Column("status", lambda gate: gate[1].status, numeric=False),
        Column("holds if", lambda gate: MEANINGS.get(gate[0]), numeric=False),
        Column("reasons", lambda gate: "; ".join(gate[1].reasons), numeric=False),
    )
    return Table(columns, tuple(cell.gates.items()), prose=True)


gates_section = table_section("Gates", lambda cell, records: gates_table(cell))


def _output_noun(cell: Cell, records: Sequence[Record]) -> str:
    """Return the noun for the outputs that are counted.

    It is requests, picks (of frames), token rows of a kernel, or scored tokens.
    """
    if any("scoring" in case.known_notes for record in records for case in record.cases):
        return "scored tokens"
    if any(row.metric == "decode_ms" for row in cell.rows):
        return "picks"
    return "requests" if all(row.case == "all" for row in cell.rows) else "token rows"


def agreement_table(report: IdentityReport, noun: str) -> Table[OutputAgreement]:
    """Return the number of every arm's outputs that agree with the reference run's.

    ``noun``: plural noun for the outputs (:func:`_output_noun`).
    """
    agreements = [agreement for agreement in report.agreement if agreement.total]

    def first_difference(agreement: OutputAgreement) -> str:
        first = report.first(agreement.arm)
        return "none" if first is None else f"{first.case}: {first.where}; {first.run}"

    columns: tuple[Column[OutputAgreement], ...] = (
        Column("arm", lambda a: a.arm, numeric=False),
        Column(f"{noun} that agree in every run", lambda a: f"{a.agree:,} of {a.total:,}"),
        Column("agreeing prefix", lambda a: f"{share_pct_text(a.prefix, 1)}%"),
        Column("first difference", first_difference, numeric=False),
    )
    return Table(columns, tuple(agreements), (f"Compared with run {report.reference}.",))


@section("Outputs")
def outputs_section(report: CellSource) -> Parts:
    """Show the number of outputs that agree with the reference run's."""
    noun = _output_noun(report.cell, report.records)
    return table_parts(agreement_table(report.analysis.identity, noun))


def _failures_table(cell: Cell, record_folder: str = "") -> Table[list[Failure]]:
    """Return the runs that failed by themselves, with links to their records and logs.

    Failures that are alike are one line. The runs that such a run ended, because they shared its
    process, are in a note.
    """
    groups: dict[tuple[str, ...], list[Failure]] = {}
    lost: list[str] = []
    failed = {failure.run for failure in cell.failures}
    for failure in cell.failures:
        if failure.failed_by in failed:
            lost.append(failure.run)
            continue
        groups.setdefault((failure.arm, failure.outcome, str(failure.detail)), []).append(failure)

    def names(runs: list[Failure]) -> str:
        return f"{runs[0].run} and {len(runs) - 1} more" if len(runs) > 1 else runs[0].run

    def log(runs: list[Failure]) -> str:
        return f"{record_folder}{runs[0].log}" if runs[0].log else ""

    columns: tuple[Column[list[Failure]], ...] = (
        Column("arm", lambda runs: runs[0].arm, numeric=False),
        Column(
            "run",
            names,
            numeric=False,
            link=lambda runs: f"{record_folder}runs/{runs[0].run}.json",
        ),
        Column("outcome", lambda runs: runs[0].outcome, numeric=False),
        Column("detail", lambda runs: runs[0].detail, str, numeric=False),
        Column("log", lambda runs: runs[0].log, numeric=False, link=log),
    )
    return Table(columns, tuple(groups.values()), (_lost_text(lost),) if lost else ())


def _lost_text(runs: Sequence[str]) -> str:
    shown, hidden = runs[:MAX_SHOWN_LOST], len(runs) - MAX_SHOWN_LOST
    more = f" and {hidden} more" if hidden > 0 else ""
    return f"Also lost, because they shared its process: {', '.join(shown)}{more}."


@section("Failed runs")
def failures_section(report: CellSource) -> Parts:
    """Show the failed runs."""
    return table_parts(_failures_table(report.cell, report.record_folder))
