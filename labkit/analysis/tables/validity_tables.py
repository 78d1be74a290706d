"""What a result rests on: gates, agreement of outputs, failed runs, and every run's value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from labkit.analysis.comparison.output_identity import IdentityReport, OutputAgreement
from labkit.analysis.document.report_parts import (
    CellSource,
    Parts,
    Section,
    section,
    table_parts,
    table_section,
)
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.findings.verdict_sentences import cell_phrases, verdict_sentence
from labkit.analysis.model.cell_model import Cell, Failure, GateResult
from labkit.analysis.model.result_row import Row
from labkit.analysis.number_format import magnitude_text, share_pct_text, significant_text
from labkit.config import count_text
from labkit.records import Record

MEANINGS = {
    "healthy": "every run ended well, on a machine that stayed the same",
    "engaged": "every arm ran the path that it claims",
    "identical": "the arms' outputs agree as claimed",
}
MAX_SHOWN_LOST = 6
MAX_VALUES = 4_000  # per cell; if a cell has more values, only its charts show them


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


def _outputs(report: CellSource) -> Parts:
    noun = _output_noun(report.cell, report.records)
    return table_parts(agreement_table(report.analysis.identity, noun))


outputs_section = Section("Outputs", _outputs)


def _failures_table(cell: Cell, record_folder: str) -> Table[list[Failure]]:
    """Return the runs that failed by themselves, with links to their records and logs.

    Failures that are alike are one line. The runs that such a run ended, because they shared its
    process, are in a note.
    """
    groups: dict[tuple[str, ...], list[Failure]] = {}
    lost: list[str] = []
    failed = {failure.run for failure in cell.failures}
    for one in cell.failures:
        if one.failed_by in failed:
            lost.append(one.run)
        else:
            groups.setdefault((one.arm, one.outcome, str(one.detail)), []).append(one)

    def names(runs: list[Failure]) -> str:
        return f"{runs[0].run} and {len(runs) - 1} more" if len(runs) > 1 else runs[0].run

    def record(runs: list[Failure]) -> str:
        return f"{record_folder}runs/{runs[0].run}.json"

    def log(runs: list[Failure]) -> str:
        return f"{record_folder}{runs[0].log}" if runs[0].log else ""

    columns: tuple[Column[list[Failure]], ...] = (
        Column("arm", lambda runs: runs[0].arm, numeric=False),
        Column("run", names, numeric=False, link=record),
        Column("outcome", lambda runs: runs[0].outcome, numeric=False),
        Column("detail", lambda runs: runs[0].detail, str, numeric=False),
        Column("log", lambda runs: runs[0].log, numeric=False, link=log),
    )
    shown, hidden = ", ".join(lost[:MAX_SHOWN_LOST]), len(lost) - MAX_SHOWN_LOST
    more = f" and {hidden} more" if hidden > 0 else ""
    note = f"Also lost, because they shared its process: {shown}{more}."
    return Table(columns, tuple(groups.values()), (note,) if lost else ())


failures_section = Section(
    "Failed runs", lambda report: table_parts(_failures_table(report.cell, report.record_folder))
)


@dataclass(frozen=True)
class ArmRuns:
    """An arm's summary in words, and the name, value and record of each run in one row."""

    arm: str
    summary: str
    runs: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class RowRuns:
    """A row's index in the cell, its title, its verdicts and the runs of every arm."""

    index: int
    title: str
    sentences: Sequence[str]
    arms: Sequence[ArmRuns]


@dataclass(frozen=True)
class RunList:
    """The runs behind the rows of a cell; HTML only.

    ``has_values``: whether each run's value is shown, linked to its record.
    """

    rows: Sequence[RowRuns]
    has_values: bool
    kind: ClassVar[str] = "runs"


def run_list(cell: Cell, claim: str, record_folder: str) -> RunList:
    """Return the runs behind every measured row of a cell."""
    phrases = cell_phrases(cell, claim)
    rows = [
        RowRuns(
            index,
            f"{row.case}, {row.metric} ({row.unit})",
            [verdict_sentence(phrases, row, one) for one in row.comparisons],
            list(_arm_runs(row, record_folder)),
        )
        for index, row in enumerate(cell.rows)
        if row.skipped is None
    ]
    count = sum(len(arm.runs) for row in rows for arm in row.arms)
    return RunList(rows, count <= MAX_VALUES)


def _arm_runs(row: Row, record_folder: str) -> Iterator[ArmRuns]:
    for arm, values in row.arms.items():
        parts, one = [""], row.comparison(arm)
        if values.n:
            numbers = (values.median, values.q1, values.q3)
            median, q1, q3 = (significant_text(number or 0.0, 6) for number in numbers)
            count = count_text(values.n, "run")
            parts = [f": median {median}, quartiles {q1} to {q3}, {count}"]
        if one is not None and one.wins is not None:
            parts.append(f"better in {one.wins} of {count_text(one.blocks, 'block')}")
        if one is not None and one.mde_pct is not None:
            parts.append(f"smallest detectable effect {magnitude_text(one.mde_pct)} %")
        runs = [
            (run.file.split("/")[-1], significant_text(run.value, 6), f"{record_folder}{run.file}")
            for run in values.runs
        ]
        yield ArmRuns(arm, "; ".join(parts), runs)


@section("Runs behind each number")
def runs_section(report: CellSource) -> Parts:
    """Show the runs behind each number."""
    claim = report.analysis.data.arms[0].identity
    runs = run_list(report.cell, claim, report.record_folder)
    return [runs] if runs.rows else []
