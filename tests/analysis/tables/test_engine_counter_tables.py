"""Tables of engine counters, and of results with failed arms."""

from __future__ import annotations

from planted_cells import planted_cell, section_table

from labkit.analysis.tables.engine_counter_tables import engine_counters_section

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
    table = section_table(engine_counters_section, cell)
    return [tuple(table.cells(line)) for line in table.lines]


def test_only_counters_that_differ_are_shown_and_no_control():
    table = section_table(engine_counters_section, CELL)
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
    assert section_table(engine_counters_section, planted_cell(arms=kernel)) is None
    assert section_table(engine_counters_section, planted_cell(arms=ARMS[:1])) is None
