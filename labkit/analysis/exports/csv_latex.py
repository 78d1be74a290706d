"""A cell's results as CSV with every number unrounded, and as a LaTeX table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from labkit.analysis.comparison.text_quality import limit_fields
from labkit.analysis.document.table_model import Table
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.row_model import Comparison, Row

# Columns of the file: of the row, of the comparison's baseline and arm, and of the comparison.
ROW_COLUMNS = ("case", "metric", "unit", "better", "primary", "skipped")
ARM_COLUMNS = ("median", "q1", "q3", "n")
COMPARISON_COLUMNS = (
    "effect_pct", "ci_low_pct", "ci_high_pct", "level", "ci_raw_low_pct", "ci_raw_high_pct",
    "p", "p_adjusted", "p_floor", "mde_pct", "wins", "blocks", "verdict", "reason",
)  # fmt: skip


def csv_text(cells: Sequence[Cell]) -> str:
    """Return one CSV line per comparison and per row without comparisons.

    Unknown values are empty. If the workload scores texts, the lines also have the arms' quality.
    """
    has_quality = any(cell.quality is not None for cell in cells)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ("cell", *ROW_COLUMNS, "arm", "baseline", "baseline_median",
         *(f"arm_{name}" for name in ARM_COLUMNS), *COMPARISON_COLUMNS,
         *(limit_fields(None) if has_quality else ()))
    )  # fmt: skip
    for cell in cells:
        for row in cell.rows:
            for comparison in row.comparisons or [None]:
                quality = cell.qualities.get(comparison.arm) if comparison else None
                fields = (cell.cell, *(getattr(row, name) for name in ROW_COLUMNS))
                numbers = limit_fields(quality).values() if has_quality else ()
                writer.writerow((*fields, *_compared(row, comparison), *numbers))
    return out.getvalue()


def _compared(row: Row, comparison: Comparison | None) -> Iterator[Any]:
    """Yield a comparison's fields with both arms' statistics; None without a comparison."""
    if comparison is None:
        yield from (None,) * (3 + len(ARM_COLUMNS) + len(COMPARISON_COLUMNS))
        return
    yield from (comparison.arm, comparison.baseline, row.median(comparison.baseline))
    yield from (getattr(row.arms[comparison.arm], name) for name in ARM_COLUMNS)
    yield from (getattr(comparison, name) for name in COMPARISON_COLUMNS)


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
