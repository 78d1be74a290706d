"""The bars of a card: one axis for all arms, the best arm first, and what the caption says."""

from dataclasses import replace

import pytest

from labkit.analysis.charts.html_interval_bars import MAX_ARMS, IntervalScale, card_bars
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.model.result_row import Comparison


def without_counters(record):
    return replace(record, counters={"engine.paged": 1.0})


def comparison(effect, low=None, high=None):
    return Comparison("a", "base", effect, low, high)


def test_an_axis_holds_effects_intervals_the_margin_and_zero():
    scale = IntervalScale.of([comparison(-8.0, -10.0, -6.0)], 2.0)
    assert (scale.low, scale.high) == pytest.approx((-10.48, 2.48))
    assert scale.place(scale.low) == 0.0 and scale.place(scale.high) == 100.0
    assert IntervalScale.of([comparison(None)], 2.0).high == pytest.approx(2.16)


def test_a_bar_has_its_interval_and_its_effect_in_percent_of_the_width():
    scale = IntervalScale(-10.0, 10.0, 2.0)
    assert scale.style == "--z:50;--m:40;--n:60"
    assert scale.bar_style(comparison(5.0, 0.0, 8.0)) == "--l:50;--w:40;--e:75"
    assert scale.bar_style(comparison(5.0)) == "--e:75"
    assert scale.bar_style(comparison(None)) == ""


def test_the_best_arm_comes_first_and_further_arms_are_counted(make_cell):
    effects = {f"a{i}": 1.0 + 0.1 * ((i * 3) % 8) for i in range(8)}
    slower = card_bars(analyse(make_cell(effects=effects, claims=False, cases=("one",))))
    order = sorted(effects, key=effects.get)
    assert [line.arm for line in slower.arms] == order[:MAX_ARMS]
    assert slower.left_out == 2 and slower.caption.endswith("; further arms in the table: 2")
    rates = card_bars(analyse(make_cell("rates/x", effects=effects, claims=False, requests=True)))
    assert [line.arm for line in rates.arms] == order[::-1][:MAX_ARMS]


def test_a_caption_promises_no_interval_where_there_is_none(make_cell):
    known = card_bars(analyse(make_cell(cases=("one",))))
    metric = "time per launch, lower is better: "
    assert known.caption.startswith(metric + "the effect with its interval; axis ")
    assert all("--w" in bar for line in known.arms for bar in line.bars)
    estimate = card_bars(analyse(make_cell("few/x", cases=("one",), blocks=1, runs=1)))
    assert estimate.caption.startswith(metric + "the effect; axis ")
    assert not any("--w" in bar for line in estimate.arms for bar in line.bars)
    rows = card_bars(analyse(make_cell("rows/x")))
    assert rows.caption.startswith(metric + "each dot is a row, numbers are their range; axis ")
    assert len(rows.arms[0].bars) == 2


def test_a_bar_says_that_its_arm_is_invalid(make_cell):
    analysis = analyse(make_cell(cases=("one",)))
    assert not card_bars(analysis).arms[0].text.endswith("(invalid)")
    failed = analyse(make_cell("failed/x", cases=("one",), claims=True, change=without_counters))
    assert card_bars(failed).arms[0].text.endswith("% (invalid)")


def test_without_a_known_effect_there_are_no_bars(make_cell):
    assert card_bars(analyse(make_cell(effects={}))) is None
