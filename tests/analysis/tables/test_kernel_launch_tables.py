"""Tables of kernel workloads besides times: counters per dispatch, and the roofline."""

from dataclasses import replace

import pytest
from planted_cells import section_table

from labkit.analysis import write_study
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.tables.engine_counter_tables import dispatch_section
from labkit.analysis.tables.kernel_launch_tables import (
    host_times_section,
    launch_queue_section,
    roofline_section,
)
from labkit.analysis.tables.published_vs_measured import published_section
from labkit.analysis.tables.results_table import results_table
from labkit.records import Metric


def cells(table):
    return [dict(zip((c.heading for c in table.columns), table.cells(line), strict=True))
            for line in table.lines]  # fmt: skip


def shown(section, folder):
    """Return the first table that a section of a cell's report shows, or None."""
    analysis = analyse(folder)
    return section_table(section, analysis.cell, analysis.data.records, analysis=analysis)


def test_the_roofline_table_names_the_source_of_its_limits(make_cell):
    analysis = analyse(make_cell(noise=0.0, repeats=1))
    table = section_table(roofline_section, analysis.cell, analysis.data.records)
    first, *_, last = cells(table)
    assert (first["batch"], first["arm"]) == ("decode, 64 reqs, ctx 128", "binary_search")
    work = [first[heading] for heading in ("MB", "MFLOP", "GFLOP/s")]
    assert work == ["10.00", "10.00", "31.00"]
    assert (first["bound by"], first["share of limit"]) == ("memory", "62%")  # 200 of 322.6 us
    assert (last["arm"], last["bound by"]) == ("seq_map", "compute")
    assert last["share of limit"] == "35%"  # 2,500 of 7,049 us
    assert "50.0 GB/s reading 128 MiB, 400.0 GFLOP/s" in table.notes[1]
    bare = [replace(r, notes={}) for r in analysis.data.records]
    table = section_table(roofline_section, analysis.cell, bare)
    assert "share of limit" not in [c.heading for c in table.columns]
    assert "no shares" in table.notes[1]


def test_counters_are_columns_unless_they_stay_0(make_cell):
    table = shown(dispatch_section, make_cell())
    assert [c.heading for c in table.columns] == [
        "batch", "arm", "search iterations", "KV blocks visited"
    ]  # fmt: skip
    iterations = {(line["batch"], line["arm"]): line["search iterations"] for line in cells(table)}
    assert len(iterations) == 4
    assert iterations["prefill, 8 × 512", "binary_search"] == "64"
    assert iterations["prefill, 8 × 512", "seq_map"] == "0"


def test_only_what_the_kernel_counts_is_called_counted(make_cell):
    def change(record):
        counters = {"attention.dependent_loads": 64, "attention.bytes": 4096,
                "attention.surplus_threadgroups": 2, "window.skipped_blocks": 7}  # fmt: skip
        cases = tuple(
            replace(c, notes={**c.notes, "counters": {**c.notes["counters"], **counters}})
            for c in record.cases
        )
        return replace(record, cases=cases)

    table = shown(dispatch_section, make_cell(change=change))
    assert [c.heading for c in table.columns][2:] == [
        "search iterations", "dependent loads (computed)", "surplus threadgroups",
        "KV blocks visited", "bytes (computed)", "window skipped blocks (computed)",
    ]  # fmt: skip
    assert "The kernel itself counts, except in the columns called computed" in table.notes[0]


def test_a_counter_that_changes_from_run_to_run_says_so(make_cell):
    def change(record):
        if record.arm != "seq_map" or record.block != 1:
            return record
        case = record.cases[0]
        counters = {**case.notes["counters"], "attention.kv_blocks_visited": 513}
        changed = replace(case, notes={**case.notes, "counters": counters})
        return replace(record, cases=(changed, *record.cases[1:]))

    lines = cells(shown(dispatch_section, make_cell(change=change)))
    assert [line["KV blocks visited"] for line in lines] == ["512", "varies", "512", "512"]


def adding_notes(**notes):
    """Return a change that adds notes to records, twice as large for ``seq_map``."""

    def change(record):
        factor = 2 if record.arm == "seq_map" else 1
        notes_added = {
            name: [factor * v for v in value] if isinstance(value, list) else factor * value
            for name, value in notes.items()
        }
        cases = tuple(replace(c, notes={**c.notes, **notes_added}) for c in record.cases)
        return replace(record, cases=cases)

    return change


def test_planning_time_has_a_column(make_cell):
    table = shown(host_times_section, make_cell("study/new", change=adding_notes(plan_us=40.0)))
    assert [c.heading for c in table.columns[:5]] == [
        "batch", "binary_search maps (µs)", "binary_search plan (µs)",
        "seq_map maps (µs)", "seq_map plan (µs)",
    ]  # fmt: skip
    assert table.cells(table.lines[0])[1:5] == ["12.50", "40.00", "12.50", "80.00"]
    assert "the dispatch times above exclude this" in table.notes[0] and len(table.notes) == 2
    table = shown(host_times_section, make_cell("study/old"))
    assert [c.heading for c in table.columns[:2]] == ["batch", "binary_search (µs)"]
    assert len(table.notes) == 1


def test_numbers_beside_published_ones_are_medians_of_runs(make_cell):
    """One slow run of three changes none of them, and an even count gives the middle of two."""
    case, counter = "decode, 64 reqs, ctx 128", "attention.search_iterations"
    rows = [
        {"case": case, "metric": metric, "unit": unit, "arms": {"binary_search": 1.0}}
        for metric, unit in (("dispatch_us", "us"), ("map_us", "us"), ("plan_us", "us"))
    ]
    published = {"source": "s", "machine": "m", "rows": rows}

    def change(record):
        factor = (1.0, 2.0, 60.0, 3.0)[record.block]
        (first, *others) = record.cases
        metric = replace(first.metrics[0], repeats=(10 * factor,))
        notes = {**first.notes, "map_us": factor, "plan_us": 5 * factor}
        first = replace(first, metrics=(metric,), notes=notes)
        counters = {**record.counters, counter: factor}
        return replace(record, cases=(first, *others), counters=counters)

    for blocks, median in ((3, 2.0), (4, 2.5)):
        options = {"blocks": blocks, "runs": 1, "published": published, "change": change}
        folder = make_cell(f"{blocks}/cell", **options)
        table = shown(published_section, folder)
        ours = [line.number("seq_map") for line in table.lines if line.own_row is not None]
        assert list(map(float, ours)) == [10 * median, median, 5 * median]
        if blocks % 2:
            assert {arm["counters"][counter] for arm in analyse(folder).cell.to_json()["arms"]} == {
                median
            }


QUEUED = {
    "launches": 8, "host_us": 3.0, "empty_us": [1.0, 2.0, 9.0], "empty_single_us": [50.0, 60.0]
}  # fmt: skip


def test_launches_in_a_queue_stand_beside_empty_ones(make_cell):
    noted = adding_notes(**QUEUED)

    def change(record):
        cases = []
        for case in noted(record).cases:
            alone = Metric("single_us", "us", "lower", False, (400.0, 500.0, 900.0))
            lone_launch = () if "prefill" in case.case else (alone,)
            links = 8 if lone_launch else 1
            cases.append(
                replace(
                    case,
                    metrics=case.metrics + lone_launch,
                    notes={**case.notes, "launches": links},
                )
            )
        return replace(record, cases=tuple(cases))

    study = make_cell("study/queue", noise=0.0, repeats=1, change=change).parent
    (first, second, *_, last) = cells(shown(launch_queue_section, study / "queue"))
    assert first == {
        "batch": "decode, 64 reqs, ctx 128", "arm": "binary_search", "launches in a chain": "8",
        "in a chain (µs)": "322.6", "by itself (µs)": "500.0", "empty, in a chain (µs)": "2.00",
        "empty, by itself (µs)": "55.00", "described by the host (µs)": "3.00",
    }  # fmt: skip
    assert (second["arm"], second["empty, in a chain (µs)"]) == ("seq_map", "4.00")
    assert (last["launches in a chain"], last["in a chain (µs)"]) == ("1", "–")
    assert float(last["by itself (µs)"].replace(",", "")) > 6000
    write_study(study, plots=False)
    for form in ("report.md", "report.html"):
        assert "Queued launches" in (study / form).read_text(encoding="utf-8")
    assert shown(launch_queue_section, make_cell("study/other")) is None


def test_old_records_have_no_work_table_and_no_roofline(make_cell):
    def change(record):
        return replace(record, cases=tuple(replace(c, notes={}) for c in record.cases))

    folder = make_cell(change=change)
    assert shown(dispatch_section, folder) is None
    assert shown(roofline_section, folder) is None


def test_the_report_has_the_work_table_and_the_roofline(make_cell):
    study = make_cell("study/kernel").parent
    write_study(study, plots=False)
    text = (study / "report.md").read_text()
    assert "### Work per dispatch" in text and "(plots/kernel--roofline.png)" in text
    page = (study / "report.html").read_text()
    assert "intensity (FLOP per byte)" in page and "% of the limit</title>" in page
    assert "Cases: 1 decode, 64 reqs, ctx 128; 2 prefill, 8 × 512; arms of a case" in page
    figure = page[page.index('aria-label="roofline"') :].partition("</svg>")[0]
    assert figure.count(">1</text>") >= 1 and figure.count(">2</text>") >= 1


@pytest.mark.parametrize(
    ("states", "says"),
    [
        (["hot"], "Timed on hot caches: every launch follows one of the same arm"),
        (["cold"], "Timed on cold caches: more memory"),
        (["hot", "cold"], "the same input; cold caches:"),
        ([], None),
    ],
)
def test_the_results_table_notes_the_state_of_the_caches(make_cell, states, says):
    def change(record):
        state_notes = [{"state": state} for state in states] or [{}]
        cases = [
            replace(case, notes={**case.notes, **state_notes[i % len(state_notes)]})
            for i, case in enumerate(record.cases)
        ]
        return replace(record, cases=tuple(cases))

    folder = make_cell(change=change)
    analysis = analyse(folder)
    notes = " ".join(results_table(analysis.cell, analysis.data.records).notes)
    assert (says in notes) if says else "Timed on" not in notes
