"""A cell's tables as files: CSV with every number, LaTeX with the article's layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.analysis.rendering.tables import Table

Json = Mapping[str, Any]
NUMBERS = (
    "effect_pct",
    "ci_low_pct",
    "ci_high_pct",
    "level",
    "ci_raw_low_pct",
    "ci_raw_high_pct",
    "p",
    "p_adjusted",
    "p_floor",
    "mde_pct",
    "wins",
    "blocks",
    "verdict",
    "reason",
)
HEAD = (
    "cell",
    "case",
    "metric",
    "unit",
    "better",
    "primary",
    "skipped",
    "arm",
    "baseline",
    "baseline_median",
    "arm_median",
    "arm_q1",
    "arm_q3",
    "arm_n",
    *NUMBERS,
)


def csv_text(cells: Sequence[Json]) -> str:
    """Write one line per comparison (and per skipped row), unrounded; unknown is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)
    for cell in cells:
        for row in cell["rows"]:
            start = [cell["cell"], *(row[k] for k in HEAD[1:7])]
            for found in row["comparisons"] or [None]:
                writer.writerow(_line(start, row, found))
    return out.getvalue()


def _line(start: list[Any], row: Json, found: Json | None) -> list[Any]:
    if found is None:
        return [*start, *[None] * (len(HEAD) - len(start))]
    arm = row["arms"][found["arm"]]
    return [
        *start,
        found["arm"],
        found["baseline"],
        row["arms"][found["baseline"]]["median"],
        *(arm[k] for k in ("median", "q1", "q3", "n")),
        *(found[k] for k in NUMBERS),
    ]


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


def latex_text(table: Table, caption: str) -> str:
    """Write a table for ``booktabs``; notes stand below it."""
    columns = "".join("r" if column.number else "l" for column in table.columns)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex(caption)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(_latex(column.name) for column in table.columns) + r" \\",
        r"\midrule",
        *(" & ".join(map(_latex, line.cells)) + r" \\" for line in table.lines),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\footnotesize {_latex(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
