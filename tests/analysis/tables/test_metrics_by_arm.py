"""The matrix of metrics: groups, what a cell of it says, and the notes that explain it."""

from dataclasses import replace
from types import SimpleNamespace

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.tables.metrics_by_arm import matrix_section


def of_cell(cell):
    (made,) = matrix_section.parts(SimpleNamespace(cell=cell))
    return made


def matrix(path):
    return of_cell(analyse(path).cell)


def test_cases_of_a_metric_are_one_group_on_one_scale(make_cell):
    cell = analyse(make_cell(effects={"seq_map": 0.8})).cell
    made = of_cell(cell)
    (group,) = made.groups
    assert made.arms == ["binary_search", "seq_map"]
    assert group.name == "Time per launch (µs), lower is better"
    assert [row.name for row in group.rows] == ["decode, 64 reqs, ctx 128", "prefill, 8 × 512"]
    base, other = group.rows[0].cells
    median = cell.rows[0].median("binary_search")
    assert (base.value, base.difference, base.bar) == (f"{median:.1f}", "", "")
    assert other.sign == other.kind == "better" and other.difference.startswith("−")
    assert other.bar == group.scale.bar_style(cell.rows[0].comparison("seq_map"))


def test_metrics_of_all_requests_are_grouped_by_family_the_primary_first(make_cell):
    made = matrix(make_cell(requests=True))
    assert [group.name for group in made.groups] == ["Throughput", "Latency", "Memory"]
    assert made.groups[0].rows[0].metric == "total_tok_s"
    assert made.groups[1].rows[0].unit == "ms"


def test_a_skipped_case_has_its_reason_and_no_cells(make_cell):
    made = matrix(make_cell(skipped={"prefill, 8 × 512": "too large"}))
    row = next(r for group in made.groups for r in group.rows if r.skipped)
    assert (row.name, row.skipped, list(row.cells)) == ("prefill, 8 × 512", "too large", [])


def test_undecided_rows_are_marked_and_the_sign_is_explained(make_cell):
    made = matrix(make_cell(effects={"seq_map": 1.0}, noise=0.2))
    rows = [row for group in made.groups for row in group.rows]
    assert all(row.undecided and row.cells[1].sign == "?" for row in rows)
    assert made.notes[-1] == "? undecided."
    decided = matrix(make_cell("flat/x", effects={"seq_map": 1.0}, noise=0.0001))
    assert not any(row.undecided for group in decided.groups for row in group.rows)
    assert decided.notes[-1] == "= no difference beyond the margin."


def test_a_note_names_the_rows_that_are_estimates_among_others(make_cell):
    cell = analyse(make_cell(effects={"seq_map": 0.8})).cell
    first, last = cell.rows
    estimates = [replace(c, verdict="estimate_only", reason="why") for c in last.comparisons]
    made = of_cell(replace(cell, rows=(first, replace(last, comparisons=tuple(estimates)))))
    assert made.notes[0] == "Estimates only (prefill, 8 × 512): why."


def test_notes_name_intervals_only_where_there_are_some(make_cell):
    assert "Bars: adjusted 95 % intervals, margin ±2 % shaded." in matrix(make_cell()).notes[0]
    estimate = matrix(make_cell("few/x", blocks=1, runs=1))
    assert estimate.notes[0].startswith("Estimates only: ")
    assert "Bars: the differences, without intervals, margin ±2 %" in estimate.notes[1]
    assert matrix(make_cell("alone/x", effects={}, control=False)).notes == [
        "Values are medians over runs."
    ]
