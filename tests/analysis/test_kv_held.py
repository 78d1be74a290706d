"""The bars of KV memory: held and used, on the page and as a picture."""

import pytest

from labkit.analysis.rendering import kv_utilization
from labkit.analysis.rendering.arm_styles import save, style

MIB = 2**20


def cell(**arms):
    roles = ["baseline", *["arm"] * (len(arms) - 1)]
    counted = [
        {"peak_kv_bytes": held * MIB, "kv_used_bytes": used * MIB} if used else {"peak_kv_bytes": 1}
        for held, used in arms.values()
    ]
    made = zip(arms, roles, counted, strict=True)
    return {"cell": "c", "arms": [{"name": n, "role": r, "counters": c} for n, r, c in made]}


def test_every_arm_says_what_it_held_used_and_wasted():
    found = kv_utilization.held(cell(padded=(90, 35), paged=(35.5, 35), mlx_lm=(90, None)))
    assert [(one.arm, one.said) for one in found] == [
        ("padded", "35.00 of 90.00 MiB, 61.1 % wasted"),
        ("paged", "35.00 of 35.50 MiB, 1.4 % wasted"),
    ]


def test_arms_that_do_not_differ_have_no_picture():
    assert kv_utilization.held(cell(padded=(90, 35), mlx_lm=(90, None))) == []
    assert kv_utilization.held(cell(paged=(36, 35), seq_map=(36, 35))) == []


def test_bars_are_as_long_as_their_bytes(tmp_path):
    found = kv_utilization.held(cell(padded=(80, 20), paged=(20, 20)))
    drawn = kv_utilization.held_chart(found)
    assert drawn.count('class="bar held"') == drawn.count('class="bar used"') == 2
    assert "75.0 % wasted" in drawn
    with style():
        figure = kv_utilization.held_figure(found)
        save(figure, tmp_path / "held")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([80, 20, 20, 20])
    assert (tmp_path / "held.png").stat().st_size > 1000
