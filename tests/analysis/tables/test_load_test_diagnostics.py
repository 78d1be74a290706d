"""Tables of requests: outcomes and arrivals."""

from dataclasses import replace

from planted_cells import caveats, planted_cell, section_table

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.tables.load_test_diagnostics import request_outcomes_section
from labkit.records import CaseRecord, Record


def run(arm, block, **traffic):
    given = {"requests": 10, "served": 10, "refused": 0, "failed": 0, "sender_cpu_share": 0.01}
    case = CaseRecord("all", notes={"traffic": {**given, **traffic}} if traffic else {})
    role = "baseline" if arm == "base" else "arm"
    return Record(arm, role, block, 0, 0, "ok", "2026-01-01T00:00:00Z", cases=(case,))


SERVED = {"served": 10}
ARMS = [{"name": "base", "role": "baseline"}, {"name": "other", "role": "arm"}]
CELL = planted_cell(arms=ARMS)
BAD = {"served": 8, "refused": 1, "failed": 1, "good": 4,
       "unserved": [{"id": "r3", "outcome": "refused", "error": "no room"}]}  # fmt: skip


def test_counts_are_sums_over_runs_and_older_records_have_no_table():
    records = [run("base", 0, arrivals="closed"), run("other", 0, **BAD), run("other", 1, **BAD)]
    table = section_table(request_outcomes_section, CELL, records)
    assert [column.heading for column in table.columns] == [
        "arm", "requests", "served", "ended without a token", "ended after a token",
        "within the limits", "sender's share of a core",
    ]  # fmt: skip
    assert [table.cells(line) for line in table.lines] == [
        ["base", "10", "10", "0", "0", "0", "1.00%"],
        ["other", "20", "16", "2", "2", "8", "1.00%"],
    ]
    assert section_table(request_outcomes_section, CELL, [run("base", 0)]) is None


def test_open_loop_arrivals_have_rates_and_waits():
    spread = {"p50": 1.5, "p99": 20.0, "max": 30.0}
    sent = {"asked_per_s": 4.0, "due_per_s": 3.9, "sent_per_s": None}
    table = section_table(
        request_outcomes_section, CELL, [run("base", 0, queue_ms=spread, late_ms=spread, **sent)]
    )
    assert table.cells("base")[5:11] == ["4.00", "3.90", "", "1.50", "20.00", "20.00"]
    assert table.columns[5].heading == "requested (1/s)"


def test_a_rate_of_sessions_is_no_rate_of_requests():
    """It said "requested 1" beside "due 4" of sessions of four turns."""
    sent = {"late_ms": {"p99": 0.0}, "asked_per_s": 1.0, "asked_unit": "sessions/s"}
    table = section_table(request_outcomes_section, CELL, [run("base", 0, **sent)])
    assert (table.columns[5].heading, table.cells("base")[5]) == ("requested (sessions/s)", "1.00")
    both = [run("base", 0, **sent), run("other", 0, **sent | {"asked_unit": "requests/s"})]
    table = section_table(request_outcomes_section, CELL, both)
    assert table.columns[5].heading == "requested (sessions/s or requests/s)"


def caveats_of(make_cell, blocks, traffic):
    """Return the caveats on arm seq_map; ``traffic``: what its run in a block notes."""

    def change(record):
        own = traffic(record.block) if record.arm == "seq_map" else {"arrivals": "closed"}
        noted = run("other", 0, **own).cases[0].notes
        cases = (replace(case, notes={**case.notes, **noted}) for case in record.cases)
        return replace(record, cases=tuple(cases))

    options = {"requests": True, "blocks": blocks, "runs": 1, "change": change}
    lines = caveats(analyse(make_cell(**options)))
    return [line for line in lines if line.startswith("seq_map: ")]


def test_unserved_requests_and_waits_at_the_client_are_caveats(make_cell):
    queued = {"queue_ms": {"p50": 1500.0, "p99": 2.0, "max": 2.0}}
    assert caveats_of(make_cell, 1, lambda block: {**BAD, **queued}) == [
        "seq_map: 2 of 10 requests were not served, 1 of them without a first token (request r3: "
        "no room); its numbers describe the rest",
        "seq_map: half of the requests waited 1,500 ms or more at the client "
        "(workload.concurrency); no latency includes this wait",
    ]


def test_a_wait_that_latencies_include_and_a_load_that_was_not_sustained_are_caveats(make_cell):
    spread = {"p50": 1500.0, "p99": 2.0, "max": 2.0}
    slow = {"queue_ms": spread, "latency_from": "arrival", "due_per_s": 40.0, "sent_per_s": 5.04}
    fast = {"due_per_s": 40, "sent_per_s": 39}
    load, wait = caveats_of(make_cell, 2, lambda block: slow if block else fast)
    assert load == (
        "seq_map: its load was not sustained in 1 of 2 runs: requests arrived at 40 per second and "
        "were sent at 5.04"
    )
    assert wait.endswith("(workload.concurrency); latencies include this wait")


def test_the_table_says_that_the_time_of_a_run_counts_requests_that_failed():
    notes = [
        section_table(request_outcomes_section, CELL, [run("base", 0, **one)]).notes
        for one in (SERVED, BAD)
    ]
    texts = ["number includes requests", "number but the time of a run includes requests"]
    assert all(text in "".join(note) for text, note in zip(texts, notes, strict=True))
