"""Published differences beside ours: which rows have one, and what is drawn of them."""

from dataclasses import replace
from types import SimpleNamespace

from planted_cells import section_table

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.document.chart import Dots, Line
from labkit.analysis.model.cell_model import Published
from labkit.analysis.pages.article_placeholders import _published_numbers
from labkit.analysis.tables.published_vs_measured import published_section

CASE = "decode, 64 reqs, ctx 128"
NO_OUTPUTS = SimpleNamespace(identity=SimpleNamespace(agreement=()))


def published_chart(cell):
    """Return the chart of the section, or None."""
    report = SimpleNamespace(cell=cell, analysis=NO_OUTPUTS, records=())
    return next((p.chart for p in published_section.parts(report) if p.kind == "chart"), None)


def test_rows_and_arms_that_the_cell_lacks_are_left_out(make_cell, published):
    other = {**published["rows"][0], "case": "elsewhere"}
    stranger = {**published["rows"][0], "delta_pct": {"stranger": -3.0}}
    cell = analyse(make_cell(published={**published, "rows": [other, stranger]})).cell
    assert published_chart(cell) is None
    both = {**stranger, "delta_pct": {"seq_map": -8.1, "stranger": -3.0}}
    known = replace(cell, published=Published({**cell.published.keys, "rows": [both]}))
    dots = [mark for mark in published_chart(known).marks if isinstance(mark, Dots)]
    assert {mark.arm for mark in dots} == {"seq_map"}
    assert published_chart(analyse(make_cell("none/x")).cell) is None


def test_the_chart_joins_both_and_holds_the_interval_and_zero(make_cell, published):
    cell = analyse(make_cell(published=published)).cell
    chart = published_chart(cell)
    ours = cell.rows[0].comparison("seq_map")
    lines = {mark.style: mark.points for mark in chart.marks if isinstance(mark, Line)}
    assert lines["link"] == ((-8.1, 0.5), (ours.effect_pct, 0.5))
    assert tuple(x for x, _ in lines["line arm1"]) == ours.ci_pct
    tips = [tip for mark in chart.marks if isinstance(mark, Dots) for tip in mark.tips]
    assert tips[0].startswith(f"{CASE}, seq_map, measured here: −")
    assert tips[1] == f"{CASE}, seq_map, published: −8.1%"
    assert chart.x[0] < -8.1 and chart.x[1] > 0.0 and chart.rows == (CASE,)


def test_rows_of_several_metrics_name_theirs(make_cell, published):
    row = published["rows"][0]
    rates = {"case": "all", "metric": "total_tok_s", "delta_pct": {"seq_map": 4.0}}
    cell = analyse(make_cell(published={**published, "rows": [row, rates]}, requests=True)).cell
    assert published_chart(cell).rows == ("all: total_tok_s",)


def test_published_bytes_are_in_the_unit_of_their_heading(make_cell, published):
    """A table headed MiB showed 12,582,912."""
    sizes = {"binary_search": 12 << 20, "seq_map": 13_000_000}
    row = {"case": "all", "metric": "peak_kv_bytes", "unit": "bytes", "arms": sizes}
    cell = analyse(make_cell(published={**published, "rows": [row]}, requests=True)).cell
    table = section_table(published_section, cell, analysis=NO_OUTPUTS)
    assert [table.cells(line)[:3] for line in table.lines] == [
        ["all: peak_kv_bytes (MiB)", "12.00", "12.40"], ["here", "16.00", "16.00"]
    ]  # fmt: skip
    own = next(one for one in cell.rows if one.metric == "peak_kv_bytes")
    assert _published_numbers(cell, own, "seq_map")["published"] == "12.40 MiB"
