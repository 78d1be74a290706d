"""The section "Why" of a report, in every format; reports without clocks have none."""

from dataclasses import replace

import pytest

from labkit.analysis import write_study
from labkit.analysis.charts import step_player
from labkit.analysis.charts.step_player import TracedRun
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.tables import step_time_breakdown
from labkit.analysis.tables.kernel_launch_tables import launch_work_section

PARTS = {"schedule": 40.0, "attention": 300.0, "products": 500.0, "left_over": 60.0, "stalls": 99.0}


def with_clocks(record):
    """A run with turns with clocks: of seq_map, attention takes half as long."""
    noise = 1 + 0.001 * record.position + 0.002 * record.block
    factor = {"attention": 0.5 if record.arm == "seq_map" else 1.0}
    parts = {part: 100 * us * noise * factor.get(part, 1.0) for part, us in PARTS.items()}
    note = {"steps": {"decode": 100}, "parts_us": {"decode": parts}, "clocks_us": 4.0,
            "output_tokens": 400}  # fmt: skip
    counters = {**record.counters, "steps.decode": 200.0, "tokens.output": 800.0}
    return replace(record, notes={**record.notes, "step_parts": note}, counters=counters)


def test_a_report_says_where_the_time_went(make_cell, pictures):
    folder = make_cell("study/chat", requests=True, identity="tokens", blocks=6,
                       change=with_clocks)  # fmt: skip
    study = folder.parent
    write_study(study)
    report, page = ((study / f"report.{ending}").read_text("utf-8") for ending in ("md", "html"))
    assert "### Why: where the time went" in report and "Why: where the time went" in page
    assert "seq_map: 16.7 % less time per output token; first cause: attention, −37.9" in report
    assert "33.3 % (33.3 to 33.3) of the time goes to attention" in report
    assert "would be at most 50.0 % higher; in 10 % less time, 3.4 %" in report
    assert "| attention | 75.64 |" in report and "| total |" in report
    assert "the clocks add 0.44" in report and "(50 % of its tokens)" in report
    assert "from binary_search to seq_map" in page
    assert (study / "plots" / "chat--why-seq_map.svg").is_file()
    assert not (study / "plots" / "chat--why-control.svg").exists()
    cell = analyse(folder).cell
    assert Cell.from_json(cell.to_json()) == cell and cell.time.arms[0].cause == "attention"


@pytest.mark.parametrize(
    ("hardware", "text"),
    [
        ({"unavailable": "perf_event_open: not permitted"},
         "No hardware counters: perf_event_open: not permitted."),
        ({"decode, 64 reqs, ctx 128": {"cache_misses": 100.0}}, "−50.0 % cache misses"),
    ],
)  # fmt: skip
def test_a_report_on_kernels_says_which_work_differs(make_cell, hardware, text):
    def counted(record):
        share = 0.5 if record.arm == "seq_map" else 1.0
        note = {
            case: value if case == "unavailable" else {n: v * share for n, v in value.items()}
            for case, value in hardware.items()
        }
        return replace(record, notes={**record.notes, "hardware": note})

    study = make_cell("study/kernel", change=counted).parent
    write_study(study, plots=False)
    for ending in ("md", "html"):
        report = (study / f"report.{ending}").read_text("utf-8")
        assert "Why: the work of a launch" in report and text in report


def test_work_that_the_baseline_does_not_do_is_named(make_cell):
    """A padded grid's surplus units were left out, because the binary search has none."""

    def counted(record):
        is_arm = record.arm == "seq_map"
        own = {"attention.surplus_threadgroups": 12 if is_arm else 0}
        cases = (
            replace(case, notes={**case.notes, "counters": {**case.notes["counters"], **own}})
            for case in record.cases
        )
        hardware = {"decode, 64 reqs, ctx 128": {"cache_misses": 5.0}} if is_arm else {"x": {}}
        notes = {**record.notes, "hardware": hardware}
        return replace(record, cases=tuple(cases), notes=notes)

    report = CellReport(analyse(make_cell("study/kernel", change=counted)))
    (bullets,) = launch_work_section.parts(report)
    assert bullets.lines[0].startswith(
        "decode, 64 reqs, ctx 128, seq_map: −100.0 % search iterations, 12 surplus threadgroups "
        "(0 in binary_search); −"
    )


@pytest.mark.parametrize("requests", [False, True])
def test_records_without_clocks_have_no_such_section(make_cell, requests):
    folder = make_cell("study/old", requests=requests)
    write_study(folder.parent, plots=False)
    assert "Why:" not in (folder.parent / "report.md").read_text("utf-8")
    assert "time" not in analyse(folder).cell.to_json()


def test_traced_runs_of_earlier_versions_without_clocks_have_the_times_of_their_steps(
    make_cell, monkeypatch
):
    times = {"schedule": [0, 10], "draft": [4, 2], "build": [10, 5], "plan": [16, 4],
             "forward": [15, 79], "sample": [94, 3], "update": [97, 3]}  # fmt: skip
    steps = [{"times_us": times}, {"times_us": {"schedule": [200, 1]}}]
    monkeypatch.setattr(
        step_player, "traced_run", lambda run, _: TracedRun(run.arm, run.run, {"steps": steps})
    )
    note = {"step_trace": {"file": "x"}}
    folder = make_cell(
        "study/chat", requests=True, blocks=1,
        change=lambda record: replace(record, notes={**record.notes, **note}),
    )  # fmt: skip
    (part,) = step_time_breakdown.time_section.parts(CellReport(analyse(folder)))
    row = part.table.cells(part.table.lines[0])
    assert row[0] == "binary_search" and [float(cell) for cell in row[1:]] == [
        8, 2, 5, 4, 3, 3, 75, 100,
    ]  # fmt: skip
    assert "no clocks (an earlier version)" in part.table.notes[0]
