"""Cells of the analysis' model that tests write down, with defaults for what they leave out."""

from types import SimpleNamespace

from labkit.analysis.model.cell_model import Cell

DEFAULTS = {
    "cell": "c", "question": None, "arms": [], "design": {"alpha": 0.05, "margin_pct": 2.0},
    "gates": {}, "rows": [], "failures": [], "environment": {},
}  # fmt: skip


def planted_cell(rows=(), failures=(), **parts):
    """Return a cell with these parts of ``cell.json``."""
    rows = [
        {"case": "all", **row, "comparisons": [
            {"baseline": "base", **one} for one in row.get("comparisons", ())
        ]}
        for row in rows
    ]  # fmt: skip
    failures = [{"detail": None, **failure} for failure in failures]
    return Cell.from_json({**DEFAULTS, "rows": rows, "failures": failures, **parts})


def section_table(section, cell, records=(), **parts):
    """Return the first table that a report's section shows of a cell and its records, or None."""
    report = SimpleNamespace(cell=cell, records=records, **parts)
    return next((part.table for part in section.parts(report) if part.kind == "table"), None)
