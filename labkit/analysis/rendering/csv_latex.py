"""A cell's tables as files: CSV with every number, LaTeX with the article's layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.rendering.tables import Column, Table

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One comparison of a row, or a row without one."""

    cell: Json
    row: Json
    found: Json | None

    def number(self, key: str) -> Any:
        """Return a field of the comparison; None where there is none."""
        return None if self.found is None else self.found[key]

    def of(self, arm: str, key: str) -> Any:
        """Return a number of the arm that the comparison names under ``arm``."""
        return None if self.found is None else self.row["arms"][self.found[arm]][key]


def _of_row(key: str) -> Column[Line]:
    return Column(key, lambda line: line.row[key])


def _of_comparison(key: str) -> Column[Line]:
    return Column(key, lambda line: line.number(key))


COLUMNS: tuple[Column[Line], ...] = (
    Column("cell", lambda line: line.cell["cell"]),
    *map(_of_row, ("case", "metric", "unit", "better", "primary", "skipped")),
    *map(_of_comparison, ("arm", "baseline")),
    Column("baseline_median", lambda line: line.of("baseline", "median")),
    Column("arm_median", lambda line: line.of("arm", "median")),
    Column("arm_q1", lambda line: line.of("arm", "q1")),
    Column("arm_q3", lambda line: line.of("arm", "q3")),
    Column("arm_n", lambda line: line.of("arm", "n")),
    *map(_of_comparison, ("effect_pct", "ci_low_pct", "ci_high_pct", "level")),
    *map(_of_comparison, ("ci_raw_low_pct", "ci_raw_high_pct", "p", "p_adjusted", "p_floor")),
    *map(_of_comparison, ("mde_pct", "wins", "blocks", "verdict", "reason")),
)


def csv_text(cells: Sequence[Json]) -> str:
    """Write one line per comparison (and per skipped row), unrounded; unknown is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.heading for column in COLUMNS)
    for cell in cells:
        for row in cell["rows"]:
            for found in row["comparisons"] or [None]:
                line = Line(cell, row, found)
                writer.writerow(column.value(line) for column in COLUMNS)
    return out.getvalue()


LATEX = {
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
    """Write a table for ``booktabs``; notes stand below it."""
    columns = "".join("r" if column.number else "l" for column in table.columns)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex(caption)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(_latex(column.heading) for column in table.columns) + r" \\",
        r"\midrule",
        *(" & ".join(map(_latex, table.cells(line))) + r" \\" for line in table.lines),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\footnotesize {_latex(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
