"""A run's timeline: its memory, the phases of its requests, and peak KV memory."""

from types import SimpleNamespace

import pytest
from planted_cells import planted_cell

from labkit.analysis.charts.run_timeline_charts import (
    MAX_SHOWN_REQUESTS,
    SERIES_LABELS,
    SERIES_STYLES,
    evenly_chosen,
    kv_utilization_chart,
    kv_utilizations,
    memory_chart,
    requests_chart,
    run_timelines,
    series_class,
)
from labkit.analysis.document.chart import Bars, Line
from labkit.analysis.document.svg_elements import chart_svg

MIB = 2**20


def request(name, admitted_ms=1500, **others):
    times = {"submitted_ms": 1000, "ttft_ms": 2000, "e2e_ms": 3500, "admitted_ms": admitted_ms}
    return {"id": name, **times, **others}


def record(arm="a", ok=True, requests=None, timeline=None):
    series = {"t_s": [0, 5], "rss_bytes": [MIB, 3 * MIB], "mlx_cache_bytes": [0, 0],
              "kv_used_bytes": [None, MIB]}  # fmt: skip
    requests = [request("r0")] if requests is None else requests
    cases = [SimpleNamespace(known_notes=n) for n in ({}, {"requests": requests})]
    notes = {"timeline": series if timeline is None else timeline}
    return SimpleNamespace(arm=arm, ok=ok, run=f"b00-p00-{arm}", known_notes=notes, cases=cases)


def test_related_series_share_a_colour_and_no_two_a_style():
    assert SERIES_STYLES.keys() == SERIES_LABELS.keys()
    assert len(set(SERIES_STYLES.values())) == len(SERIES_STYLES)
    colours = {}
    for name, (colour, _) in SERIES_STYLES.items():
        if name != "mlx_peak_bytes":  # beside its own two
            colours.setdefault(SERIES_LABELS[name].partition(" ")[0].strip(","), set()).add(colour)
    assert colours == {"process": {0}, "KV": {1}, "MLX": {2}, "compressed": {4}}
    assert series_class("rss_bytes") == "line series0"
    assert series_class("swap_bytes") == "line series0 dashed"


def test_a_timeline_is_that_of_the_first_run_that_has_one():
    failed, bare = record(ok=False), record(timeline={})
    late = record(requests=[request("late")])
    records = [failed, bare, record(requests=[]), record("b"), late, record(), record("c")]
    found = run_timelines(records, ["a", "b", "d"])
    assert [(one.arm, one.run) for one in found] == [("a", "b00-p00-a"), ("b", "b00-p00-b")]
    (timeline, _) = found
    assert timeline.requests[0].request == "late" and timeline.t_s == (0.0, 5.0)
    assert timeline.memory_mib == {"rss_bytes": (1.0, 3.0), "kv_used_bytes": (0.0, 1.0)}
    assert timeline.end_s == 5.0  # the memory's last time; the request ends at 4.5
    chart = memory_chart(timeline, 6.0)
    assert (chart.x, chart.y) == ((0.0, 6.0), (0.0, pytest.approx(3.15)))
    assert [(mark.arm, mark.points) for mark in chart.marks if isinstance(mark, Line)] == [
        ("process, resident", ((0.0, 1.0), (5.0, 3.0))),
        ("KV used", ((0.0, 0.0), (5.0, 1.0))),
    ]


@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        ({}, {"waiting": (1.0, 1.5), "prefill": (1.5, 3.0), "decode": (3.0, 4.5)}),
        ({"admitted_ms": None}, {"prefill": (1.0, 3.0), "decode": (3.0, 4.5)}),
        (
            {"arrived_ms": 500},  # latencies count from there
            {"waiting": (1.0, 1.5), "prefill": (1.5, 2.5), "decode": (2.5, 4.0)},
        ),
    ],
)
def test_phases_meet_where_a_request_is_admitted_and_begins_to_decode(changes, phases):
    (timeline,) = run_timelines([record(requests=[request("r0", **changes)])], ["a"])
    (times,) = timeline.requests
    assert {name: (start, end) for name, start, end in times.phases()} == phases
    assert timeline.phases == tuple(phases)
    assert ("prefill includes waiting" in timeline.caption()) is ("waiting" not in phases)
    bars = [mark for mark in requests_chart(timeline, 6.0).marks if isinstance(mark, Bars)]
    assert [mark.boxes[0][:2] for mark in bars] == [*phases.values()]
    assert all(mark.boxes[0][2:] == pytest.approx((0.1, 0.9)) for mark in bars)


def test_of_many_requests_some_are_shown():
    many = [request(str(i)) for i in range(MAX_SHOWN_REQUESTS + 1)]
    (timeline,) = run_timelines([record(requests=many)], ["a"])
    assert len(timeline.requests) == 400 and timeline.caption("x").endswith(
        "x; 400 of 401 requests, evenly chosen"
    )
    (all_shown,) = run_timelines([record(requests=many[1:])], ["a"])
    assert all_shown.missing() == ""
    assert evenly_chosen(range(10), 4) == [0, 2, 5, 7] and evenly_chosen([1, 2], 4) == [1, 2]


def cell(**arms):
    roles = ["baseline", *["arm"] * (len(arms) - 1)]
    counters = [
        {"peak_kv_bytes": reserved * MIB, "kv_used_bytes": used * MIB}
        if used
        else {"peak_kv_bytes": 1}
        for reserved, used in arms.values()
    ]
    rows = zip(arms, roles, counters, strict=True)
    return planted_cell(arms=[{"name": n, "role": r, "counters": c} for n, r, c in rows])


def test_every_label_has_reserved_used_and_wasted_memory():
    utilizations = kv_utilizations(cell(padded=(90, 35), paged=(35.5, 35), mlx_lm=(90, None)))
    assert [(each.arm, each.label) for each in utilizations] == [
        ("padded", "35.00 of 90.00 MiB, 61.1 % wasted"),
        ("paged", "35.00 of 35.50 MiB, 1.4 % wasted"),
    ]


def test_arms_that_do_not_differ_have_no_bars():
    assert kv_utilizations(cell(padded=(90, 35), mlx_lm=(90, None))) == []
    assert kv_utilizations(cell(paged=(36, 35), seq_map=(36, 35))) == []


def test_bars_are_as_long_as_their_bytes():
    utilizations = kv_utilizations(cell(padded=(80, 20), paged=(20, 20)))
    svg = chart_svg(kv_utilization_chart(utilizations))
    assert svg.count('class="bar reserved"') == svg.count('class="bar used"') == 2
    assert "75.0 % wasted" in svg
