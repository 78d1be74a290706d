"""Bars of peak KV memory, reserved and used, on the HTML page and as a picture."""

from planted_cells import planted_cell

from labkit.analysis.charts import peak_kv_memory_chart
from labkit.analysis.document.svg_elements import chart_svg

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


def test_every_label_has_reserved_used_and_wasted_memory():
    utilizations = peak_kv_memory_chart.kv_utilizations(
        cell(padded=(90, 35), paged=(35.5, 35), mlx_lm=(90, None))
    )
    assert [(each.arm, each.label) for each in utilizations] == [
        ("padded", "35.00 of 90.00 MiB, 61.1 % wasted"),
        ("paged", "35.00 of 35.50 MiB, 1.4 % wasted"),
    ]


def test_arms_that_do_not_differ_have_no_bars():
    assert peak_kv_memory_chart.kv_utilizations(cell(padded=(90, 35), mlx_lm=(90, None))) == []
    assert peak_kv_memory_chart.kv_utilizations(cell(paged=(36, 35), seq_map=(36, 35))) == []


def test_bars_are_as_long_as_their_bytes():
    utilizations = peak_kv_memory_chart.kv_utilizations(cell(padded=(80, 20), paged=(20, 20)))
    svg = chart_svg(peak_kv_memory_chart.kv_utilization_chart(utilizations))
    assert svg.count('class="bar reserved"') == svg.count('class="bar used"') == 2
    assert "75.0 % wasted" in svg
