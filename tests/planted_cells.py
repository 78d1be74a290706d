"""Cells of the analysis' model that tests write down, with defaults for what they leave out."""

from types import SimpleNamespace

from labkit.analysis.comparison.output_identity import compare_outputs
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.robustness.caveats import ranked_caveats
from labkit.analysis.studies.between_study_comparison import compare_with_first
from labkit.records import CaseRecord, Record

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


def output_difference(reference, outputs, claim="none"):
    """Return where an arm's outputs first differ from those of the baseline, or None."""
    records = [
        Record(arm, role, 0, 0, 0, "ok", "now", cases=(CaseRecord("case", outputs=given),))
        for arm, role, given in (("base", "baseline", reference), ("new", "arm", outputs))
    ]
    first = compare_outputs(records, ["base", "new"], None, claim).first("new")
    return None if first is None else first.where


def caveats(analysis):
    """Return all caveats on a cell's numbers, those that could change the answer first."""
    ranked = ranked_caveats(analysis)
    return [*ranked.could_change, *ranked.for_the_record]


def compare_studies(old, new, margin_pct):
    """Return the comparison of two studies, each a sequence of cells' analyses."""
    (comparison,) = compare_with_first(old, [new], margin_pct)
    return comparison
