"""A run's timeline: its memory, the phases of its requests, and peak KV memory."""

from types import SimpleNamespace

import pytest
from planted_cells import planted_cell

from labkit.analysis.charts.memory_and_request_timelines import (
    MAX_SHOWN_REQUESTS,
    SERIES,
    kv_utilization_section,
    memory_timeline_section,
    request_timeline_section,
)
from labkit.analysis.document.chart import Bars, Line, Text

MIB = 2**20


def request(name, admitted_ms=1500, **others):
    times = {"submitted_ms": 1000, "ttft_ms": 2000, "e2e_ms": 3500, "admitted_ms": admitted_ms}
    known = {key: ms for key, ms in times.items() if ms is not None}
    return {"id": name, **known, **others}


def record(arm="a", ok=True, requests=None, timeline=None):
    series = {"t_s": [0, 5], "rss_bytes": [MIB, 3 * MIB], "mlx_cache_bytes": [0, 0],
              "kv_used_bytes": [None, MIB]}  # fmt: skip
    requests = [request("r0")] if requests is None else requests
    cases = [SimpleNamespace(known_notes=n) for n in ({}, {"requests": requests})]
    notes = {"timeline": series if timeline is None else timeline}
    return SimpleNamespace(arm=arm, ok=ok, run=f"b00-p00-{arm}", known_notes=notes, cases=cases)


def test_related_series_share_a_colour_and_no_two_a_style():
    assert len({style for _, style in SERIES.values()}) == len(SERIES)
    colours = {}
    for name, (label, style) in SERIES.items():
        if name != "mlx_peak_bytes":  # beside its own two
            colours.setdefault(label.partition(" ")[0].strip(","), set()).add(style.split()[1])
    assert colours == {
        "process": {"series0"},
        "KV": {"series1"},
        "MLX": {"series2"},
        "compressed": {"series4"},
    }


def shown(records, arms=("a",), section=request_timeline_section):
    """Return the section's charts, each with its caption and keys."""
    cell = SimpleNamespace(real_arms=arms, stem=str)
    parts = section.parts(SimpleNamespace(records=records, cell=cell))
    return [part for part in parts if part.kind == "chart"]


def test_a_timeline_is_that_of_the_first_run_that_has_one():
    failed, bare = record(ok=False), record(timeline={})
    late = record(requests=[request("late")])
    records = [failed, bare, record(requests=[]), record("b"), late, record(), record("c")]
    found = shown(records, ["a", "b", "d"], memory_timeline_section)
    assert [part.caption for part in found] == ["a, run b00-p00-a", "b, run b00-p00-b"]
    (requests, _) = shown(records, ["a", "b", "d"])
    assert requests.chart.marks[0].tips == ("late",)
    chart = found[0].chart
    # To the memory's last time; the request ends at 4.5.
    assert (chart.x, chart.y) == ((0.0, 5.0), (0.0, pytest.approx(3.15)))
    assert found[0].keys == (
        ("process, resident", "line series0", "line"), ("KV used", "line series1", "line"),
    )  # fmt: skip
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
    (part,) = shown([record(requests=[request("r0", **changes)])])
    assert ("prefill includes waiting" in part.caption) is ("waiting" not in phases)
    bars = [mark for mark in part.chart.marks if isinstance(mark, Bars)]
    assert {mark.style: mark.boxes[0][:2] for mark in bars} == phases
    assert part.keys == tuple((name, f"bar {name}", "bar") for name in phases)
    assert all(mark.boxes[0][2:] == pytest.approx((0.1, 0.9)) for mark in bars)


def test_of_many_requests_some_are_shown():
    many = [request(str(i)) for i in range(1000)]
    (part,) = shown([record(requests=many)])
    assert part.caption.endswith("; 400 of 1,000 requests, evenly chosen")
    waiting = part.chart.marks[0].tips
    assert len(waiting) == 400 and waiting[:4] == ("0", "2", "5", "7")
    (all_shown,) = shown([record(requests=many[:MAX_SHOWN_REQUESTS])])
    assert all_shown.caption.endswith("in the order of submission")


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


def charts(**arms):
    """Return the charts of the page's section, and of the picture beside it."""
    parts = kv_utilization_section.parts(SimpleNamespace(cell=cell(**arms)))
    return [part.chart for part in parts[:1] for _ in parts[1:]]


def test_every_label_has_reserved_used_and_wasted_memory():
    (chart,) = charts(padded=(90, 35), paged=(35.5, 35.6), mlx_lm=(90, None))
    assert chart.rows == ("padded", "paged")
    assert [mark.text for mark in chart.marks if isinstance(mark, Text)] == [
        "35.00 of 90.00 MiB, 61.1 % wasted",
        "35.50 of 35.50 MiB, 0.0 % wasted",
    ]
    bars = [mark for mark in chart.marks if isinstance(mark, Bars)]
    assert [(bar.arm, bar.style, bar.boxes[0][:2]) for bar in bars] == [
        ("padded", "reserved", (0, 90)), ("padded", "used", (0, 35)),
        ("paged", "reserved", (0, 35.5)), ("paged", "used", (0, 35.5)),
    ]  # fmt: skip


def test_arms_that_do_not_differ_have_no_bars():
    assert charts(padded=(90, 35), mlx_lm=(90, None)) == []
    assert charts(paged=(36, 35), seq_map=(36, 35)) == []
