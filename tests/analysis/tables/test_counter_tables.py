"""Tables of engine counters, and of results with failed arms."""

from __future__ import annotations

from planted_cells import planted_cell

from labkit.analysis.tables.counter_tables import engine_counters_table
from labkit.analysis.tables.results_table import results_table

SLOW = {
    "steps.total": 10.0,
    "host_ms": 5.0,
    "device_ms": 40.0,
    "step_ms": 45.0,
    "tokens.padded": 1234567.0,
    "padding.waste_pct": 59.4302,
    "requests.submitted": 8.0,
}
FAST = {
    "steps.total": 20.0,
    "host_ms": 5.0,
    "device_ms": 30.0,
    "step_ms": 35.0,
    "requests.submitted": 8.0,
}
ARMS = [
    {"name": "padded", "role": "baseline", "counters": SLOW},
    {"name": "paged", "role": "arm", "counters": FAST},
    {"name": "control", "role": "control", "counters": SLOW},
]
CELL = planted_cell(arms=ARMS)


def rows(cell):
    table = engine_counters_table(cell)
    return [tuple(table.cells(line)) for line in table.lines]


def test_only_counters_that_differ_are_shown_and_no_control():
    table = engine_counters_table(CELL)
    assert [column.heading for column in table.columns] == ["counter", "padded", "paged"]
    assert rows(CELL) == [
        ("padding.waste_pct", "59.4", ""),
        ("steps.total", "10", "20"),
        ("tokens.padded", "1,234,567", ""),
        ("host time per step (ms)", "0.500", "0.250"),
        ("model time per step (ms)", "4.000", "1.500"),
    ]


def test_kernel_workloads_and_single_arms_have_no_counter_table():
    kernel = [{**arm, "counters": {"kernel.decode": 3.0}} for arm in ARMS]
    assert engine_counters_table(planted_cell(arms=kernel)) is None
    assert engine_counters_table(planted_cell(arms=ARMS[:1])) is None


def test_an_arm_that_failed_in_every_run_shows_the_outcome():
    failures = [
        {"run": "b00-p02-padded_tight", "outcome": "oom", "detail": "killed"},
        {"run": "b01-p00-padded_tight", "outcome": "oom", "detail": "killed"},
        {"run": "b01-p01-naive-2", "outcome": "timeout", "detail": "killed"},
    ]
    died = planted_cell(failures=failures).failure_outcomes
    assert died == {"padded_tight": "oom", "naive-2": "timeout"}
    lost = {"run": "b00-p00-base", "outcome": "oom", "failed_by": "b00-p02-padded_tight"}
    assert planted_cell(failures=[lost]).failure_outcomes == {"base": "lost"}
    medians = {"base": {"median": 250.0}, "padded_tight": {"median": None}}
    row = {"case": "all", "metric": "total_tok_s", "unit": "tok/s", "primary": True}
    row |= {"skipped": None, "arms": medians, "comparisons": []}
    arms = [{"name": "base", "role": "baseline"}, {"name": "padded_tight", "role": "arm"}]
    for cause, peak in ((failures, "oom"), ([], "–")):
        table = results_table(planted_cell([row], cause, arms=arms), [])
        assert table.cells(table.lines[0])[1:3] == ["250.0", peak]
