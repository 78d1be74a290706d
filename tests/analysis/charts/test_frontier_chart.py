"""Throughput against latency of a cell's arms: points, frontier and names."""

from dataclasses import replace
from types import SimpleNamespace

from planted_cells import planted_cell

from labkit.analysis.charts.latency_throughput_chart import frontier_section
from labkit.analysis.document.chart import Dots, Line, Text

THROUGHPUT = {"base": 100.0, "fast": 200.0, "slow": 90.0, "control": 101.0}
LATENCY = {"base": 50.0, "fast": 70.0, "slow": 60.0, "control": 50.5}


def row(metric, unit, medians):
    arms = {arm: {"median": value} for arm, value in medians.items()}
    return {"metric": metric, "unit": unit, "case": "all", "arms": arms}


def cell(throughput=THROUGHPUT, latency=LATENCY):
    roles = {"base": "baseline", "control": "control"}
    arms = [{"name": name, "role": roles.get(name, "arm")} for name in throughput]
    rows = [row("total_tok_s", "tok/s", throughput), row("e2e_p50_ms", "ms", latency)]
    return planted_cell(rows, arms=arms)


def charts(cell):
    return [part.chart for part in frontier_section.parts(SimpleNamespace(cell=cell))]


def named(chart):
    return [mark.text for mark in chart.marks if isinstance(mark, Text)]


def test_the_chart_has_a_point_for_each_arm_and_names_those_on_the_frontier():
    (chart,) = charts(cell())
    dots = [mark for mark in chart.marks if isinstance(mark, Dots)]
    tips = [tip for dot in dots for tip in dot.tips]
    assert tips == [
        "base: 100.0 tok/s, 50.00 ms, on the frontier",
        "fast: 200.0 tok/s, 70.00 ms, on the frontier",
        "slow: 90.00 tok/s, 60.00 ms",
    ]
    assert named(chart) == ["base", "fast"]
    (line,) = (mark for mark in chart.marks if isinstance(mark, Line))
    assert line.points == ((50.0, 100.0), (70.0, 100.0), (70.0, 200.0))
    assert chart.x_label == "e2e_p50_ms (ms)" and chart.y_label == "total_tok_s (tok/s)"


def test_an_arm_that_another_equals_in_one_and_beats_in_the_other_is_not_on_the_frontier():
    rates, times = {"base": 90.0, "b": 100.0, "a": 100.0}, {"base": 50.0, "b": 60.0, "a": 50.0}
    (chart,) = charts(cell(rates, times))
    assert named(chart) == ["a"]


def test_two_arms_or_arms_without_a_latency_have_no_chart():
    assert charts(cell({"base": 1.0, "fast": 2.0}, {"base": 1.0, "fast": 2.0})) == []
    assert charts(cell(latency={**LATENCY, "slow": None})) == []
    assert charts(replace(cell(), rows=cell().rows[:1])) == []


def test_a_frontier_of_many_arms_is_not_named():
    arms = [f"a{n}" for n in range(9)]
    (chart,) = charts(cell(*({arm: float(n + 1) for n, arm in enumerate(arms)},) * 2))
    assert named(chart) == []
