"""Published differences beside ours: which rows have one, and what is drawn of them."""

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.document.chart import Dots, Line
from labkit.analysis.tables.published_table import published_chart

CASE = "decode, 64 reqs, ctx 128"


def test_rows_and_arms_that_the_cell_lacks_are_left_out(make_cell, published):
    other = {**published["rows"][0], "case": "elsewhere"}
    stranger = {**published["rows"][0], "delta_pct": {"stranger": -3.0}}
    cell = analyse(make_cell(published={**published, "rows": [other, stranger]})).cell
    assert published_chart(cell) is None
    assert published_chart(analyse(make_cell("none/x")).cell) is None


def test_the_chart_joins_both_and_holds_the_interval_and_zero(make_cell, published):
    cell = analyse(make_cell(published=published)).cell
    chart = published_chart(cell)
    one = cell.rows[0].comparison("seq_map")
    lines = {mark.style: mark.points for mark in chart.marks if isinstance(mark, Line)}
    assert lines["link"] == ((-8.1, 0.5), (one.effect_pct, 0.5))
    assert tuple(x for x, _ in lines["line arm1"]) == one.ci_pct
    tips = [tip for mark in chart.marks if isinstance(mark, Dots) for tip in mark.tips]
    assert tips[0].startswith(f"{CASE}, seq_map, measured here: −")
    assert tips[1] == f"{CASE}, seq_map, published: −8.1%"
    assert chart.x[0] < -8.1 and chart.x[1] > 0.0 and chart.rows == (CASE,)


def test_rows_of_several_metrics_name_theirs(make_cell, published):
    row = published["rows"][0]
    rates = {"case": "all", "metric": "total_tok_s", "delta_pct": {"seq_map": 4.0}}
    cell = analyse(make_cell(published={**published, "rows": [row, rates]}, requests=True)).cell
    assert published_chart(cell).rows == ("all: total_tok_s",)
