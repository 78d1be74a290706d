"""A cell's results as CSV with every number unrounded, and as a LaTeX table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.comparison.quality_limits import limit_fields
from labkit.analysis.comparison.text_quality import quality_by_arm
from labkit.analysis.document.table_model import Column, Table

Json = Mapping[str, Any]


@dataclass(frozen=True)
class CsvLine:
    """One comparison of a row, or a row without comparisons (``comparison`` is None)."""

    cell: Json
    row: Json
    comparison: Json | None

    def quality(self, key: str) -> Any:
        """Return field ``key`` of the arm's quality (``limit_fields``), or None if unknown."""
        arm = self.compared("arm")
        return limit_fields(quality_by_arm(self.cell).get(arm))[key]

    def compared(self, key: str) -> Any:
        """Return field ``key`` of the comparison, or None if the line has no comparison."""
        return None if self.comparison is None else self.comparison[key]

    def summary(self, role: str, key: str) -> Any:
        """Return statistic ``key`` of the comparison's arm or baseline (``role``).

        None if the line has no comparison.
        """
        if self.comparison is None:
            return None
        return self.row["arms"][self.comparison[role]][key]


def _row_column(key: str) -> Column[CsvLine]:
    return Column(key, lambda line: line.row[key])


def _comparison_column(key: str) -> Column[CsvLine]:
    return Column(key, lambda line: line.compared(key))


COLUMNS: tuple[Column[CsvLine], ...] = (
    Column("cell", lambda line: line.cell["cell"]),
    *map(_row_column, ("case", "metric", "unit", "better", "primary", "skipped")),
    *map(_comparison_column, ("arm", "baseline")),
    Column("baseline_median", lambda line: line.summary("baseline", "median")),
    Column("arm_median", lambda line: line.summary("arm", "median")),
    Column("arm_q1", lambda line: line.summary("arm", "q1")),
    Column("arm_q3", lambda line: line.summary("arm", "q3")),
    Column("arm_n", lambda line: line.summary("arm", "n")),
    *map(_comparison_column, ("effect_pct", "ci_low_pct", "ci_high_pct", "level")),
    *map(_comparison_column, ("ci_raw_low_pct", "ci_raw_high_pct", "p", "p_adjusted", "p_floor")),
    *map(_comparison_column, ("mde_pct", "wins", "blocks", "verdict", "reason")),
)


def _quality_column(key: str) -> Column[CsvLine]:
    return Column(key, lambda line: line.quality(key))


def csv_text(cells: Sequence[Json]) -> str:
    """Return one CSV line per comparison and per row without comparisons.

    Unknown values are empty. If the workload scores texts, the lines also have the arms' quality.
    """
    has_quality = any("quality" in cell for cell in cells)
    columns = (*COLUMNS, *(map(_quality_column, limit_fields(None)) if has_quality else ()))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.heading for column in columns)
    for cell in cells:
        for row in cell["rows"]:
            for comparison in row["comparisons"] or [None]:
                line = CsvLine(cell, row, comparison)
                writer.writerow(column.value(line) for column in columns)
    return out.getvalue()


LATEX_CHARACTERS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "µ": r"$\mu$",
    "–": "--",
}


def latex_text(table: Table[Any], caption: str) -> str:
    """Return a table in LaTeX (``booktabs``), with its notes below it."""
    alignment = "".join("r" if column.numeric else "l" for column in table.columns)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escaped(caption)}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(_escaped(column.heading) for column in table.columns) + r" \\",
        r"\midrule",
        *(" & ".join(map(_escaped, table.cells(line))) + r" \\" for line in table.lines),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\footnotesize {_escaped(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return "".join(LATEX_CHARACTERS.get(character, character) for character in text)
