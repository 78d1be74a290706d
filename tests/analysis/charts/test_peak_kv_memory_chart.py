"""Bars of peak KV memory, reserved and used, on the HTML page and as a picture."""

from types import SimpleNamespace

from planted_cells import planted_cell

from labkit.analysis.charts.peak_kv_memory_chart import kv_utilization_section
from labkit.analysis.document.chart import Bars, Text

MIB = 2**20


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
