"""The geometry of charts as SVG: ticks, corners, rows, and marks at their points."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import javascript
import pytest

from labkit.analysis.document.chart import Chart
from labkit.analysis.document.svg_chart_renderer import (
    BOTTOM,
    LEFT,
    MARKS,
    MAX_NAME_WIDTH,
    MAX_RECTANGLES,
    RIGHT,
    TOP,
    WIDTH,
    chart_svg,
    mark_svg,
)

SCRIPT = Path(__file__).parents[3] / "labkit" / "analysis" / "pages" / "templates" / "charts.js"
FLOOR = 200 - BOTTOM
MIDDLE = ((LEFT + WIDTH - RIGHT) / 2, (TOP + FLOOR) / 2)


def chart(**options):
    return Chart("a & b", (0, 10), (-2, 2), "time <s>", "rate", height=200, **options)


def drawn(made):
    """Return the picture's elements."""
    return list(ET.fromstring(chart_svg(made)).iter())


def numbers(element, *names):
    return tuple(float(element.get(name)) for name in names)


def points(element):
    return [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]


def ticks(low, high, **options):
    """Return the labels of the ticks of a horizontal axis, apart by a space."""
    made = Chart("t", (low, high), (0, 1), "x", y_ticks=False, **options)
    *labels, _ = (element.text for element in drawn(made) if element.tag == "text")
    return " ".join(labels)


LINEAR = [
    (0, 10, "0 2 4 6 8 10"),
    (0, 6, "0 1 2 3 4 5 6"),
    (0, 6.1, "0 2 4 6"),
    (-0.5, 1, "−0.5 0 0.5 1"),
    (3, 3, "3"),
    (1, 0, "1"),
    (0.1, 0.3, "0.1 0.15 0.2 0.25 0.3"),
    (0, 3e6, "0 500,000 1,000,000 1,500,000 2,000,000 2,500,000 3,000,000"),
    (999.94, 999.94, "999.9"),
    (-1000, -1000, "−1,000"),
    (234.48, 234.72, "234.5 234.55 234.6 234.65 234.7"),
    (2660.1, 2660.9, "2,660.2 2,660.4 2,660.6 2,660.8"),
    (0, 2.1e-11, "0 0.000000000005 0.00000000001 0.000000000015 0.00000000002"),
]


@pytest.mark.parametrize(("low", "high", "labels"), LINEAR)
def test_ticks_are_round_numbers_within_the_range(low, high, labels):
    assert ticks(low, high) == labels


POWERS = [
    (0, 1, "1 2 5 10"),
    (-1, 1, "0.1 0.2 0.5 1 2 5 10"),
    (-1, 1.1, "0.1 1 10"),
    (0.31, 3, "10 100 1,000"),
    (0.31, 2.3, "5 10 20 50 100"),
]


@pytest.mark.parametrize(("low", "high", "labels"), POWERS)
def test_powers_of_ten_have_ticks_between_them_over_two_decades(low, high, labels):
    assert ticks(low, high, log_scale=True) == labels


@pytest.mark.skipif(not javascript.HAS_JAVASCRIPT, reason=javascript.NO_JAVASCRIPT)
def test_the_page_s_script_has_the_same_ticks():
    script = SCRIPT.read_text("utf-8")
    own = script[script.index("labkit.grouped =") : script.index("labkit.svg =")]
    calls = ("ticks(low, high, 6)", "powerTicks(low, high)")
    programs = [
        f"const labkit = {{}};\n{own}\nreturn input.map(([low, high]) => "
        f"labkit.{call}.map(([, text]) => text).join(' '));"
        for call in calls
    ]
    for program, known in zip(programs, (LINEAR, POWERS), strict=True):
        (texts,) = javascript.run([program], [one[:2] for one in known])
        assert texts == [labels for *_, labels in known]


def test_the_range_fills_the_panel_and_grid_lines_stand_at_ticks():
    made = chart()
    made.line([(0, -2), (5, 0), (10, 2)], "a0")
    svg, *elements = drawn(made)
    assert (svg.get("viewBox"), svg.get("role")) == (f"0 0 {WIDTH} 200", "img")
    assert svg.get("aria-label") == "a & b"
    (line,) = [e for e in elements if e.tag == "polyline"]
    assert points(line) == [(LEFT, FLOOR), MIDDLE, (WIDTH - RIGHT, TOP)]
    lines = [numbers(e, "x1", "x2", "y1", "y2") for e in elements if e.get("class") == "grid"]
    upright = [x for x, right, *y in lines if x == right and tuple(y) == (TOP, FLOOR)]
    level = [y for *x, y, below in lines if y == below and tuple(x) == (LEFT, WIDTH - RIGHT)]
    width, height = WIDTH - LEFT - RIGHT, FLOOR - TOP
    assert upright == pytest.approx([LEFT + i * width / 5 for i in range(6)], abs=0.06)
    assert level == pytest.approx([FLOOR - i * height / 4 for i in range(5)], abs=0.06)
    assert len(lines) == 11
    texts = {e.text: e for e in elements if e.tag == "text"}
    assert set(texts) == {*["0", "2", "4", "6", "8", "10", "−2", "−1", "1"], "time <s>", "rate"}
    assert numbers(texts["8"], "y") == (FLOOR + 16,)
    assert (texts["8"].get("text-anchor"), texts["10"].get("text-anchor")) == ("middle", "end")
    assert numbers(texts["−1"], "x", "y") == pytest.approx((LEFT - 6, FLOOR - height / 4))
    assert texts["−1"].get("text-anchor") == "end"
    assert numbers(texts["time <s>"], "x", "y") == (round(MIDDLE[0]), 200 - 6)
    turned = f"translate(14 {MIDDLE[1]:.0f}) rotate(-90)"
    assert texts["rate"].get("transform") == turned


def test_axes_may_lack_ticks_and_have_their_own_or_powers_of_ten():
    texts = [e.text for e in drawn(chart(y_ticks=False, x_ticks=((5, "five"),))) if e.tag == "text"]
    assert texts == ["five", "time <s>", "rate"]
    texts = [e.text for e in drawn(chart(log_scale=True)) if e.tag == "text"]
    assert "100" in texts and "0.01" in texts


def test_rows_stand_below_each_other_beside_their_names():
    made = Chart("t", (0, 1), (0, 3), "x", rows=("a", "b" * 10, "c"), row_height=30)
    for row, name in enumerate(made.rows):
        made.dot(0, 3 - row - 0.5, "a0", tip=name)
    svg, *elements = drawn(made)
    assert svg.get("viewBox") == f"0 0 {WIDTH} {3 * 30 + TOP + BOTTOM}"
    left = 16 + round(7.1 * 10)
    middles = [TOP + 15, TOP + 45, TOP + 75]
    dots = [numbers(e, "cx", "cy") for e in elements if e.tag == "circle"]
    assert dots == [(left, middle) for middle in middles]
    names = [e for e in elements if e.text in made.rows and e.tag == "text"]
    assert [numbers(e, "x", "y") for e in names] == [(left - 8, middle) for middle in middles]
    assert not any(e.get("x2") == str(WIDTH - RIGHT) for e in elements)  # no level grid line
    long = Chart("t", (0, 1), (0, 1), "x", rows=("x" * 90,))
    long.dot(0, 0.5, "a0")
    assert numbers(next(e for e in drawn(long) if e.tag == "circle"), "cx") == (MAX_NAME_WIDTH,)


@pytest.mark.parametrize("mark", [*MARKS, "cross"])
def test_a_mark_is_centred_on_its_point(mark):
    made = chart()
    made.dot(5, 0, "a0", mark, tip="1 < 2")
    (dot,) = [e for e in drawn(made) if e.get("class") == "a0"]
    assert dot.find("title").text == "1 < 2"
    alone = ET.fromstring(mark_svg(mark, "a1"))
    assert alone.get("class") == "a1" and alone.find("title") is None
    if mark == "circle":
        assert numbers(dot, "cx", "cy", "r") == (*MIDDLE, 4.5)
        assert numbers(alone, "cx", "cy") == (7, 7)
        return
    corners = [(x - MIDDLE[0], y - MIDDLE[1]) for x, y in points(dot)]
    assert {(round(-x, 1), round(y, 1)) for x, y in corners} == {
        (round(x, 1), round(y, 1)) for x, y in corners
    }
    assert max(abs(c) for corner in corners for c in corner) <= 5.5
    assert len(corners) == {"square": 4, "triangle": 3, "diamond": 4, "cross": 12}[mark]
    upper, lower = min(y for _, y in corners), max(y for _, y in corners)
    assert -upper == pytest.approx(lower, abs=1.01) and lower - upper == pytest.approx(9, abs=2.01)
    moved = [(round(x - 7, 1), round(y - 7, 1)) for x, y in points(alone)]
    assert moved == [(round(x, 1), round(y, 1)) for x, y in corners]


def test_a_picture_with_links_is_a_group():
    made = chart(x_names=("r1", "r2"), record_folder="cell/")
    made.dots([(1, 0), (2, 1)], "a0", "circle")
    svg, *elements = drawn(made)
    assert svg.get("role") == "group"
    links = [e.get("href") for e in elements if e.tag == "a"]
    assert links == ["cell/runs/r1.json", "cell/runs/r2.json"]


@pytest.mark.parametrize("count", [MAX_RECTANGLES, MAX_RECTANGLES + 1])
def test_bars_are_rectangles_or_one_path_of_the_same_corners(count):
    made = chart()
    for i in range(count):
        made.bar((i / 100, i / 100 + 5), (-1, 1), "p0", tip=f"bar {i}" if i else "")
    elements = [e for e in drawn(made) if (e.get("class") or "").startswith("bar p0")]
    width, height = (WIDTH - LEFT - RIGHT) / 2, (FLOOR - TOP) / 2
    top = TOP + (FLOOR - TOP) / 4
    lefts = [LEFT + i / 100 * (WIDTH - LEFT - RIGHT) / 10 for i in range(count)]
    if count > MAX_RECTANGLES:
        (path,) = elements
        found = [tuple(map(float, one)) for one in re.findall(
            r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H([\d.]+)z", path.get("d")
        )]  # fmt: skip
        for box, left in zip(found, lefts, strict=True):
            expected = (left, top, left + width, top + height, left)
            assert box == pytest.approx(expected, abs=0.06)
        return
    boxes = [numbers(e, "x", "y", "width", "height") for e in elements]
    for box, left in zip(boxes, lefts, strict=True):
        assert box == pytest.approx((left, top, width, height), abs=0.06)
    titles = [e.findtext("title") for e in elements]
    assert titles == [None, *(f"bar {i}" for i in range(1, count))]


def test_bands_texts_and_limits_are_where_they_belong():
    made = chart()
    made.band(0, 5, "upright")
    made.band(-2, 0, "level", across=True)
    made.text(5, 0, "here", "end", dx=3, dy=-4)
    made.limit(2, "early")
    made.limit(9, "late")
    elements = {e.get("class") or e.text: e for e in drawn(made)}
    box = "x", "y", "width", "height"
    width, height = WIDTH - LEFT - RIGHT, FLOOR - TOP
    assert numbers(elements["upright"], *box) == (LEFT, TOP, width / 2, height)
    assert numbers(elements["level"], *box) == (LEFT, MIDDLE[1], width, height / 2)
    assert numbers(elements["here"], "x", "y") == (MIDDLE[0] + 3, MIDDLE[1] - 4)
    assert elements["here"].get("text-anchor") == "end"
    at = LEFT + 0.9 * width
    assert numbers(elements["limit"], "x1", "x2", "y1", "y2") == (at, at, TOP, FLOOR)
    assert numbers(elements["late"], "x", "y") == pytest.approx((at - 5, TOP + 8))
    assert elements["late"].get("text-anchor") == "end"
    assert numbers(elements["early"], "x") == pytest.approx((LEFT + 0.2 * width + 5,), abs=0.06)
    assert elements["early"].get("text-anchor") == "start"


def test_a_range_of_one_number_is_drawn():
    made = Chart("t", (3, 3), (4, 4), "x", height=200)
    made.dot(3, 4, "a0")
    (dot,) = [e for e in drawn(made) if e.tag == "circle"]
    assert numbers(dot, "cx", "cy") == (LEFT, FLOOR)
