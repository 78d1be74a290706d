"""Charts as pictures: every kind of mark, with its colour, place and scale."""

import pytest

from labkit.analysis.document.chart import Chart
from labkit.analysis.document.report_parts import ChartPart
from labkit.analysis.document.svg_chart_renderer import COLOURS, CONTROL_COLOUR
from labkit.analysis.pages import matplotlib_figures
from labkit.analysis.pages.matplotlib_figures import chart_figure, write_figure


def chart(**options):
    return Chart("title", (0.0, 4.0), (0.0, 2.0), "x", "y", **options)


def test_every_mark_is_drawn_where_the_chart_has_it(tmp_path):
    made = chart(rows=("one", "two"), x_ticks=((1.0, "a"), (3.0, "b")))
    made.band(1.0, 2.0, "margin")
    made.bar((0.0, 3.0), (0.1, 0.9), "reserved", arm="a")
    made.line([(0.0, 0.5), (4.0, 1.5)], "line arm1 dashed", "a")
    made.dot(2.0, 1.0, "arm1", "triangle", arm="a")
    made.dot(3.0, 1.0, "control", "cross", arm="control")
    made.text(3.0, 0.5, "beside", dx=7)
    made.limit(1.5, "limit")
    figure = chart_figure([ChartPart(made)])
    (axes,) = figure.axes
    line, up, cross, limit = axes.lines
    assert list(line.get_xdata()) == [0.0, 4.0] and line.get_linestyle() == "--"
    assert (line.get_color(), up.get_color(), up.get_marker()) == (COLOURS[1], COLOURS[1], "^")
    assert (cross.get_color(), cross.get_marker()) == (CONTROL_COLOUR, "x")
    assert list(limit.get_xdata()) == [1.5, 1.5]
    (bars,) = axes.collections
    assert bars.get_paths()[0].get_extents().bounds == pytest.approx((0.0, 0.1, 3.0, 0.8))
    assert [text.get_text() for text in axes.texts] == ["beside", "limit"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert list(axes.get_yticks()) == [1.5, 0.5] and axes.get_xlim() == (0.0, 4.0)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "control"]
    write_figure([ChartPart(made)], tmp_path / "made")
    write_figure([ChartPart(made)], tmp_path / "again")
    for ending in ("png", "svg"):
        first, again = (tmp_path / f"{stem}.{ending}" for stem in ("made", "again"))
        assert first.read_bytes() == again.read_bytes()


def test_a_picture_is_drawn_again_only_if_its_chart_or_a_colour_changed(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        matplotlib_figures, "chart_figure", lambda *words: drawn.append(1) or chart_figure(*words)
    )
    made, other = chart(), chart()
    other.text(3.0, 0.5, "beside", dx=7)
    (tmp_path / "b.png").touch()  # a picture of an earlier labkit
    (tmp_path / "b.svg").write_text("<svg/>")
    for name, shown, times in (("a", made, 1), ("a", made, 1), ("a", other, 2), ("b", made, 3)):
        write_figure([ChartPart(shown)], tmp_path / name)
        assert len(drawn) == times
    (tmp_path / "a.png").unlink()
    write_figure([ChartPart(other)], tmp_path / "a")
    assert len(drawn) == 4 and (tmp_path / "a.png").stat().st_size
    monkeypatch.setattr(matplotlib_figures, "CONTROL_COLOUR", "#777777")
    write_figure([ChartPart(other)], tmp_path / "a")
    assert len(drawn) == 5


def test_exponents_of_ten_and_unknown_published_dots():
    made = chart(log_scale=True)
    made.dot(1.0, 2.0, "published", "diamond", arm="a")
    (axes,) = chart_figure([ChartPart(made)]).axes
    (dot,) = axes.lines
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (10.0, 100.0)
    assert axes.get_xscale() == "log" and dot.get_markerfacecolor() == "white"


def test_charts_are_panels_and_a_legend_of_long_names_fits():
    keys = tuple((30 * letter, f"line arm{i}", "line") for i, letter in enumerate("abcdef"))
    made = chart()
    figure = chart_figure([ChartPart(made, keys=keys), ChartPart(made), ChartPart(made)], 2)
    assert [panel.get_visible() for panel in figure.axes] == [True, True, True, False]
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert 0 <= legend.get_window_extent().x0 < legend.get_window_extent().x1 <= figure.bbox.x1


def test_dollars_in_a_name_are_no_formula(tmp_path):
    """The report of prompts with prices ended in a traceback, or set them as a formula."""
    price = "Is 10% of $50 more than 5% of $80?"
    made = chart(rows=(price, "two"), x_ticks=((1.0, price),))
    made.title = made.x_label = made.y_label = price
    made.dot(2.0, 1.0, "arm1", arm=price)
    made.dot(3.0, 1.0, "arm2", arm="b")
    made.text(3.0, 0.5, price)
    made.limit(1.5, price)
    write_figure([ChartPart(made)] * 2, tmp_path / "made")
    (axes, _), legend = (figure := chart_figure([ChartPart(made)] * 2)).axes, figure.legends[0]
    labels = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *legend.get_texts()[:1]]
    labels += [axes.get_yticklabels()[0], axes.get_xticklabels()[0]]
    escaped = r"Is 10% of \$50 more than 5% of \$80?"
    assert {label.get_text() for label in labels} == {escaped}
