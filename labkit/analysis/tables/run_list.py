"""The list of runs behind each number: every arm's runs in a row, linked to their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from labkit.analysis.document.report_parts import CellSource, Parts, section
from labkit.analysis.findings.verdict_sentences import cell_phrases, verdict_sentence
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Row
from labkit.analysis.number_format import magnitude_text, significant_text
from labkit.config import count_text

MAX_VALUES = 4_000  # per cell; if a cell has more values, only its charts show them


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
            list(_arms(row, record_folder)),
        )
        for index, row in enumerate(cell.rows)
        if row.skipped is None
    ]
    count = sum(len(arm.runs) for row in rows for arm in row.arms)
    return RunList(rows, count <= MAX_VALUES)


def _arms(row: Row, record_folder: str) -> Iterator[ArmRuns]:
    for arm, values in row.arms.items():
        parts: list[str] = [""]
        if values.n:
            numbers = (values.median, values.q1, values.q3)
            median, q1, q3 = (significant_text(number or 0.0, 6) for number in numbers)
            count = count_text(values.n, "run")
            parts = [f": median {median}, quartiles {q1} to {q3}, {count}"]
        comparison = row.comparison(arm)
        if comparison is not None and comparison.wins is not None:
            blocks = count_text(comparison.blocks, "block")
            parts.append(f"better in {comparison.wins} of {blocks}")
        if comparison is not None and comparison.mde_pct is not None:
            parts.append(f"smallest detectable effect {magnitude_text(comparison.mde_pct)} %")
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
