"""Arms that did not serve the same requests, or counted tokens otherwise, get no wrong verdict."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from labkit.analysis.comparison.cell_analysis import CellData, analyse
from labkit.analysis.comparison.machine_or_arm_stalls import StallAttribution
from labkit.analysis.comparison.request_comparability import sustained
from labkit.analysis.comparison.validity_gates import healthy
from labkit.analysis.model.cell_model import CellDesign
from labkit.analysis.pages.study_overview import capacity_chart, capacity_table
from labkit.analysis.studies.increasing_load import capacity_loads, serving_capacities
from labkit.records import Arm, CaseRecord, Metric, Record

ALL = tuple(f"r{i}" for i in range(40))


def run(arm, served=ALL, asked=ALL, role=None, block=0):
    lost = [name for name in asked if name not in served]
    traffic = {
        "requests": len(asked), "served": len(served), "refused": 0, "failed": len(lost),
        "unserved": [{"id": name, "outcome": "failed", "error": "it broke off"} for name in lost],
    }  # fmt: skip
    notes = {"requests": [{"id": name} for name in served], "traffic": traffic}
    role = role or {"base": "baseline", "control": "control"}.get(arm, "arm")
    return Record(
        arm,
        role,
        block,
        0,
        0,
        "ok",
        "2026-11-20T20:00:00Z",
        cases=(CaseRecord("all", notes=notes),),
    )


BASE, OTHER = run("base"), run("server", asked=ALL[:8], served=ALL[:8])
HALF, ALL_BUT_ONE, ALL_BUT_THREE = ALL[::2], ALL[1:], ALL[3:]


@pytest.mark.parametrize(
    ("records", "arms"),
    [
        ([BASE, run("server"), run("control")], ""),
        ([BASE, run("server", HALF)], "server"),
        ([BASE, run("server", ALL_BUT_ONE)], "server"),
        ([BASE, run("server"), run("server", HALF, block=1), run("other")], "server"),
        ([BASE, run("server"), run("control", ALL_BUT_ONE)], "all"),
        ([BASE, run("base", HALF, block=1), run("server")], "all"),
        ([run("base", ALL_BUT_ONE), run("server")], "server"),
        ([run("base", ALL_BUT_ONE), run("server", ALL_BUT_ONE)], ""),  # one that no arm can serve
        ([run("base", ALL_BUT_THREE), run("server", ALL_BUT_THREE)], "all"),
        ([run("server", HALF)], "server"),
        ([BASE, OTHER], ""),  # other requests by design, and every one was served
        ([BASE, replace(BASE, arm="server", role="arm", cases=())], ""),
    ],
)
def test_arms_that_served_other_requests_or_few_are_not_healthy(records, arms):
    gate = healthy(records)
    assert (gate.status == "fail") is bool(arms)
    assert bool(gate.cause("server")) is bool(arms) and bool(gate.cause("x")) is (arms == "all")
    assert all("were not served" in reason for reason in gate.reasons)


def test_the_reason_names_the_run_and_the_first_error():
    (reason,) = healthy([BASE, run("server", HALF)]).reasons
    assert reason == (
        "b00-p00-server: 20 of 40 requests were not served, and the baseline served others; "
        "it broke off"
    )
    (alone,) = healthy([run("server", HALF)]).reasons  # the baseline's run crashed
    assert alone == "b00-p00-server: 20 of 40 requests were not served; it broke off"


def counting(arm, change):
    """Return a change of a cell's records: the arm is a server, as ``change`` notes."""

    def changed(record):
        if record.arm != arm:
            return record
        return replace(record, notes={**record.notes, "engine": {"server": change}})

    return changed


@pytest.mark.parametrize(
    ("notes", "cause"),
    [
        ({"counted_by": "usage", "counted_beyond_max": 0}, None),
        ({"counted_by": "usage"}, None),  # an older record
        ({"counted_by": "token ids"}, None),
        ({"counted_by": "tokenizer"}, "tokens were counted by different means: seq_map's by token"),
        ({"counted_by": "tokenizer and usage"}, "seq_map's by tokenizer and usage, binary"),
        (
            {"counted_by": "tokenizer", "counted_beyond_max": 3},
            "the tokenizer counts more tokens than max_tokens allows in 3 requests of b00-",
        ),
        (
            {"counted_by": "usage", "counted_below_chunks": 1},
            "the usage counts fewer tokens than chunks arrived in 1 request of b00-",
        ),
    ],
)  # fmt: skip
def test_tokens_counted_by_different_means_get_no_verdict(make_cell, notes, cause):
    cell = make_cell(requests=True, blocks=6, runs=1, change=counting("seq_map", notes))
    words = {row.metric: one for row, one in analyse(cell).cell.compared if one.arm == "seq_map"}
    assert words["ttft_p50_ms"].verdict != "invalid"
    for metric in ("total_tok_s", "output_tok_s"):
        assert (words[metric].verdict == "invalid") is (cause is not None)
        assert cause is None or cause in words[metric].reason


TOKENIZER = {"counted_by": "tokenizer"}
BEYOND_MAX = {"counted_by": "usage", "counted_beyond_max": 1}
BUNDLES = {"counted_by": "usage", "first_chunk_excess_pct": 20.0}
EXCESS = "may hold 20 % of the tokens after the first"


@pytest.mark.parametrize(
    ("notes", "cause"),
    [
        ({"counted_by": "usage", "first_chunk_excess_pct": 0.9}, None),
        (TOKENIZER, "tokens were counted by different means"),
        (BEYOND_MAX, "the count is unusable"),
        (BUNDLES, EXCESS),
    ],
)
@pytest.mark.parametrize("limits", [{"ttft_ms": 9.0, "tpot_ms": None}, {"tpot_ms": 9.0}])
def test_goodput_within_a_limit_on_tpot_needs_counts_that_compare(make_cell, limits, notes, cause):
    count = counting("seq_map", notes)

    def change(record):
        (case,) = (changed := count(record)).cases
        names = {"total_tok_s": "goodput_req_s", "output_tok_s": "tpot_excl_first_p50_ms"}
        metrics = [replace(one, name=names.get(one.name, one.name)) for one in case.metrics]
        return replace(changed, cases=(replace(case, metrics=tuple(metrics)),))

    cell = make_cell(requests=True, blocks=6, runs=1, change=change, metrics=["goodput_req_s"],
                     limits=limits)  # fmt: skip
    words = {row.metric: one for row, one in analyse(cell).cell.compared if one.arm == "seq_map"}
    expected = {
        "goodput_req_s": cause if limits["tpot_ms"] else None,
        "tpot_excl_first_p50_ms": cause,
        "ttft_p50_ms": None,
    }
    for metric, reason in expected.items():
        assert (words[metric].verdict == "invalid") is (reason is not None), metric
        assert reason is None or reason in words[metric].reason


def test_a_baseline_whose_count_is_unusable_leaves_no_verdict_on_tokens(make_cell):
    notes = {"counted_by": "tokenizer", "counted_beyond_max": 1}
    cell = make_cell(requests=True, blocks=6, runs=1, change=counting("binary_search", notes))
    compared = analyse(cell).cell.compared
    words = {one.verdict for row, one in compared if row.metric == "total_tok_s"}
    assert words == {"invalid"}


@pytest.mark.parametrize(
    ("traffic", "expected"),
    [
        ({}, True),
        ({"due_per_s": None, "sent_per_s": None}, True),
        ({"due_per_s": 40.0, "sent_per_s": 39.0}, True),
        ({"due_per_s": 40.0, "sent_per_s": 5.0}, False),
    ],
)
def test_a_load_that_is_sent_more_slowly_than_it_arrives_is_not_sustained(traffic, expected):
    assert sustained(traffic) is expected


def capacities(arms, records, alpha=0.05, withheld=None):
    """Return the capacities of a cell's arms."""
    data = SimpleNamespace(
        arms=arms,
        records=records,
        judged_records=records,
        design=CellDesign.from_json({"alpha": 0.05}),
        criteria=SimpleNamespace(alpha=alpha),
        withheld_reason=withheld,
    )
    loads = tuple(capacity_loads(SimpleNamespace(data=data)))
    return serving_capacities([SimpleNamespace(capacities=loads)], [""])


@pytest.mark.parametrize(
    ("change", "at_least"),
    [
        ({}, 40.0),
        ({"server": BUNDLES}, 40.0),  # its limit is not on TPOT
        ({"server": BUNDLES, "tpot_ms": 50.0}, None),
        ({"server": TOKENIZER, "tpot_ms": 50.0}, None),
        ({"server": BEYOND_MAX, "tpot_ms": 50.0}, None),
        ({"tpot_ms": 50.0}, 40.0),
        ({"sent_per_s": 5.0}, None),  # few clients held the requests back
        ({"outcome": "crashed"}, None),  # the run counts, with no request within the limits
    ],
)
def test_the_capacity_counts_no_run_that_failed_or_was_not_sustained(change, at_least):
    change = dict(change)
    workload = {
        "capacity": 90.0,
        "arrivals": {"rate": 40.0},
        "limits": {"ttft_ms": 100.0, "tpot_ms": change.pop("tpot_ms", None), "e2e_ms": None},
    }
    notes = {"engine": {"server": change.pop("server", {})}}
    outcome, detail = change.get("outcome", "ok"), "the server ended"
    traffic = {"requests": 200, "good": 200, "due_per_s": 40.0, "sent_per_s": 40.0, **change}
    case = CaseRecord("all", notes={"traffic": traffic})
    records = [
        replace(BASE, block=block, cases=(case,) if outcome == "ok" or block % 2 else (),
                outcome="ok" if block % 2 else outcome, detail=detail, notes=notes)
        for block in range(6)
    ]  # fmt: skip
    (one,) = capacities([Arm("base", "baseline", {}, {"workload": workload})], records)
    assert one.capacity.at_least == at_least and len(one.loads[0].good) == 6
    assert (one.cause is not None) == ("Not decided: the capacity of base" in one.sentence)
    slow = "Not sustained: the load at 40 requests/s." in one.sentence
    assert slow is ("sent_per_s" in change)


LIMITED = {"capacity": 90.0, "arrivals": {"rate": 40.0}, "limits": {"ttft_ms": 100.0}}


def test_arms_that_differ_in_their_engine_divide_alpha():
    roles = {"base": "baseline", "server": "arm", "control": "control"}
    arms = [
        Arm(name, role, {}, {"workload": LIMITED, "engine": {"name": name}})
        for name, role in roles.items()
    ]
    case = CaseRecord("all", notes={"traffic": {"requests": 200, "good": 200}})
    records = [replace(run(arm, block=i), cases=(case,)) for arm in roles for i in range(6)]
    found = capacities(arms, records)
    assert [(one.name, one.alpha) for one in found] == [("base", 0.025), ("server", 0.025)]
    assert all("at 40 requests/s (97.5 % confidence)" in one.sentence for one in found)


def test_a_capacity_of_sessions_is_no_rate_of_requests():
    traffic = {"requests": 200, "good": 200, "asked_unit": "sessions/s"}
    case = CaseRecord("all", notes={"traffic": traffic})
    records = [replace(BASE, block=block, cases=(case,)) for block in range(6)]
    (one,) = capacities([Arm("base", "baseline", {}, {"workload": LIMITED})], records)
    assert "at 40 sessions/s (95 % confidence)" in one.sentence
    table, chart = capacity_table([one]), capacity_chart(one).chart
    assert table.columns[1].heading == "sessions/s"
    assert chart.x_label == "sessions/s (evenly spaced)"
    mixed = capacity_table([one, replace(one, unit="requests/s")])
    assert [mixed.cells(line)[1] for line in mixed.lines] == ["40 sessions/s", "40 requests/s"]


def test_a_capacity_claims_nothing_while_nothing_may_be_claimed():
    case = CaseRecord("all", notes={"traffic": {"requests": 200, "good": 200}})
    records = [replace(BASE, block=block, cases=(case,)) for block in range(6)]
    arms = [Arm("base", "baseline", {}, {"workload": LIMITED})]
    (one,) = capacities(arms, records, alpha=0.0, withheld="6 of 9 blocks are done")
    assert one.capacity.at_least is None and one.loads[0].share_interval(one.alpha) == (0.0, 1.0)
    assert one.sentence == (
        "Not decided: the capacity of base within TTFT 100 ms: 6 of 9 blocks are done."
    )


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ({"swap": {"used_bytes": 32 << 20}}, "swap grew in b01-p00-base"),
        ({"host": "another"}, "the host changed"),
        ({"host": "one"}, None),
    ],
)
def test_a_capacity_claims_nothing_of_doubtful_times(end, cause):
    """The gate failed, so nothing was claimed of the arms, but their capacity was."""
    case = CaseRecord("all", notes={"traffic": {"requests": 200, "good": 200}})
    records = [
        replace(BASE, block=block, cases=(case,), environment={"host": "one"}) for block in range(6)
    ]
    records[1] = replace(records[1], environment_end=end)
    (one,) = capacities([Arm("base", "baseline", {}, {"workload": LIMITED})], records)
    assert one.cause == cause and one.capacity.at_least == (None if cause else 40.0)


@pytest.mark.parametrize(
    ("stalls", "good"),
    [
        (None, 200),
        (StallAttribution({"base": 3.0}), 200),
        (StallAttribution({"base": 3.0}, kept_reason="the stalls are the arm's own work"), 120),
    ],
)
def test_the_capacity_counts_requests_that_were_late_by_an_arm_s_own_stalls(stalls, good):
    limits = {"ttft_ms": 100.0, "tpot_ms": None, "e2e_ms": None}
    workload = {"capacity": 90.0, "arrivals": {"rate": 40.0}, "limits": limits}
    metrics = tuple(
        Metric(name, "", "higher", False, (value,))
        for name, value in (("goodput_req_s", 40.0), ("wall_s", 5.0))
    )
    notes = {"traffic": {"requests": 200, "good": 200}}
    notes["as_measured"] = {"goodput_req_s": 120 / 5.3, "wall_s": 5.3}
    case = CaseRecord("all", metrics=metrics, notes=notes)
    data = CellData(
        None,
        {"design": {"alpha": 0.05, "blocks": 6, "runs_per_block": 1}},
        (Arm("base", "baseline", {}, {"workload": workload}),),
        tuple(replace(BASE, block=block, cases=(case,)) for block in range(6)),
    )
    vars(data)["stalls"] = stalls
    (load,) = capacity_loads(SimpleNamespace(data=data))
    assert load.counts.good.tolist() == [good] * 6
