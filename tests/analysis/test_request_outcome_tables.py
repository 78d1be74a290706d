"""Tables of requests: outcomes, arrivals, and latency against throughput."""

from types import SimpleNamespace

import pytest

from labkit.analysis.caveats import _unserved, _waits
from labkit.analysis.latency_throughput import METRICS, load_curves
from labkit.analysis.rendering.markdown_report import markdown_table
from labkit.analysis.rendering.request_outcome_tables import (
    latency_throughput_chart,
    latency_throughput_figure,
    latency_throughput_table,
    request_outcomes_table,
)
from labkit.analysis.rendering.svg_elements import chart_svg
from labkit.records import Arm, CaseRecord, Record


def run(arm, block, **traffic):
    given = {"requests": 10, "served": 10, "refused": 0, "failed": 0, "sender_cpu_share": 0.01}
    case = CaseRecord("all", notes={"traffic": {**given, **traffic}} if traffic else {})
    role = "baseline" if arm == "base" else "arm"
    return Record(arm, role, block, 0, 0, "ok", "2026-01-01T00:00:00Z", cases=(case,))


CELL = {"arms": [{"name": "base", "role": "baseline"}, {"name": "other", "role": "arm"}]}
BAD = {"served": 8, "refused": 1, "failed": 1, "good": 4,
       "unserved": [{"id": "r3", "outcome": "refused", "error": "no room"}]}  # fmt: skip


def test_counts_are_sums_over_runs_and_older_records_have_no_table():
    records = [run("base", 0, arrivals="closed"), run("other", 0, **BAD), run("other", 1, **BAD)]
    table = request_outcomes_table(CELL, records)
    assert [column.heading for column in table.columns] == [
        "arm", "requests", "served", "refused", "failed", "within the limits",
        "sender's share of a core",
    ]  # fmt: skip
    assert [table.cells(line) for line in table.lines] == [
        ["base", "10", "10", "0", "0", "0", "1.00%"],
        ["other", "20", "16", "2", "2", "8", "1.00%"],
    ]
    assert request_outcomes_table(CELL, [run("base", 0)]) is None


def test_open_loop_arrivals_have_rates_and_waits():
    spread = {"p50": 1.5, "p99": 20.0, "max": 30.0}
    sent = {"asked_per_s": 4.0, "due_per_s": 3.9, "sent_per_s": None}
    table = request_outcomes_table(CELL, [run("base", 0, queue_ms=spread, late_ms=spread, **sent)])
    assert table.cells("base")[5:11] == ["4.00", "3.90", "", "1.50", "20.00", "20.00"]


def test_unserved_requests_and_waits_at_the_client_are_caveats():
    queued = {"queue_ms": {"p50": 1500.0, "p99": 2.0, "max": 2.0}}
    records = [run("base", 0, arrivals="closed"), run("other", 0, **BAD, **queued)]
    analysis = SimpleNamespace(data=SimpleNamespace(records=records))
    lines = [*_unserved(analysis), *_waits(analysis)]
    assert lines == [
        "other: 1 of 10 requests were refused and 1 failed (request r3: no room); its numbers "
        "describe the rest",
        "other: half of the requests waited 1,500 ms or more at the client (workload.concurrency); "
        "no latency includes this wait",
    ]


def cell(load, served, latency, by="rate", **config):
    workload = {"name": "w", "arrivals": {"kind": "poisson", "rate": None}, "concurrency": None}
    if by == "rate":
        workload["arrivals"]["rate"] = load
    else:
        workload["concurrency"] = load
    arms = [Arm("base", "baseline", {}, {"workload": workload, **config})]
    values = {"request_s": served, "e2e_p50_ms": latency}
    rows = [
        {"case": "all", "metric": m, "arms": {"base": {"median": values.get(m, 5.0)}}}
        for m in METRICS
    ]
    return SimpleNamespace(json={"rows": rows}, data=SimpleNamespace(arms=arms))


@pytest.mark.parametrize("by", ["rate", "clients"])
def test_the_knee_is_the_load_with_the_greatest_power(by):
    study = [cell(8, 4.2, 2000.0, by), cell(1, 1.0, 500.0, by), cell(4, 3.8, 700.0, by)]
    (curve,) = load_curves(study)
    assert [load.size for load in curve.loads] == [1, 4, 8]
    assert [load.power for load in curve.loads] == pytest.approx([2.0, 3.8 / 0.7, 2.1])
    assert curve.knee.size == 4
    table = latency_throughput_table([curve])
    lines = markdown_table(table).split("\n")[2:]
    assert ["knee" in line for line in lines] == [False, True, False]
    svg = chart_svg(latency_throughput_chart([curve]))
    assert svg.count("<circle") == 3 and "base: knee" in svg
    (axes,) = latency_throughput_figure([curve]).axes
    (line,) = axes.lines
    assert list(zip(*line.get_data(), strict=True)) == [(1.0, 500.0), (3.8, 700.0), (4.2, 2000.0)]
    unit = {"rate": "requests/s", "clients": "clients"}[by]
    assert axes.get_xlabel().endswith(f"at the marks: {unit}")
    labels = [text.get_text() for text in axes.texts]
    assert labels == ["1", "4, knee", "8"]


def test_no_knee_is_marked_where_power_still_grows():
    (curve,) = load_curves([cell(n, n, 500.0) for n in (1, 2, 4)])
    assert curve.knee is None and "knee" not in chart_svg(latency_throughput_chart([curve]))


def test_cells_that_differ_in_more_than_their_load_are_no_curve():
    assert load_curves([cell(1, 1.0, 5.0), cell(2, 2.0, 5.0)]) == []
    assert load_curves([cell(n, 1.0, 5.0, seed=n) for n in (1, 2, 4)]) == []
    assert latency_throughput_table([]) is None
