"""Charts as data: what is drawn of very many points, and what the page's script is given."""

import json

import pytest

from labkit.analysis.document.chart import (
    MAX_POINTS,
    Chart,
    Dots,
    changes,
    padded_range,
)
from labkit.analysis.document.svg_chart_renderer import chart_svg

MANY = [(float(i), 1000.0 if i == 7_777 else float(i % 10)) for i in range(10_000)]


def chart(points, title="runs", **options):
    made = Chart(title, (0.0, 10.0), (0.0, 1.0), "run", **options)
    made.line(points, "line arm0", "map")
    return made


@pytest.mark.parametrize("kind", ["line", "dots"])
def test_of_ten_thousand_points_the_extremes_are_drawn_and_the_chart_says_so(kind):
    made = Chart("latencies", (0.0, 1e4), (0.0, 1e3), "request")
    if kind == "line":
        made.line(MANY, "line", "map")
    else:
        made.dots(MANY, "arm0", "circle", "map")
    (mark,) = made.marks
    assert len(mark.points) <= MAX_POINTS + 2
    assert (7_777.0, 1000.0) in mark.points
    assert {mark.points[0], mark.points[-1]} == {MANY[0], MANY[-1]}
    assert made.thinned == [
        f"{len(mark.points):,} of 10,000 points of map are drawn: the lowest and the highest of "
        "each of 500 parts of the axis"
    ]


def test_few_points_are_all_drawn():
    made = chart(MANY[:MAX_POINTS])
    assert made.marks[0].points == tuple(MANY[:MAX_POINTS]) and made.thinned == []


def test_extremes_keep_the_order_and_both_ends_of_each_part():
    points = [(0.0, 1.0), (1.0, 5.0), (2.0, -3.0), (3.0, 2.0), (4.0, 0.0), (5.0, 0.5)]
    points.insert(4, (3.5, 1.5))
    assert chart([]).thin(points, "", 4) == [*points[:4], *points[5:]]
    assert chart([]).thin(points, "", 2) == [*points[:3], points[6]]


def test_dots_of_one_style_become_one_mark_with_their_tips():
    made = Chart("roofline", (0.0, 1.0), (0.0, 1.0), "x")
    for x, style in ((0.1, "arm0"), (0.2, "arm0"), (0.3, "arm1")):
        made.dot(x, x, style, tip=f"at {x}", arm=style)
    first, second = made.marks
    assert first == Dots(((0.1, 0.1), (0.2, 0.2)), "arm0", "circle", "arm0", ("at 0.1", "at 0.2"))
    assert second.points == ((0.3, 0.3),)
    assert made.tip(first, 1) == "at 0.2"


def test_a_dot_without_a_tip_is_described_by_its_run_and_leads_to_its_record():
    made = Chart("runs", (0.0, 2.0), (0.0, 9.0), "run", x_names=("b00-p00-map", "b00-p01-map"),
                 unit="us", record_folder="cell/")  # fmt: skip
    made.dots([(2.0, 8.0)], "arm0", "circle", "map")
    assert made.tip(made.marks[0], 0) == "map, b00-p01-map: 8.00 µs"
    assert made.href(made.marks[0], 0) == "cell/runs/b00-p01-map.json"
    assert 'role="group"' in chart_svg(made)  # a picture's links would be hidden
    assert 'role="img"' in chart_svg(chart([(1, 2)]))


def test_of_a_similar_chart_only_the_ys_are_written():
    base, other = chart([(1, 2), (3, 4)]), chart([(1, 7), (3, 8)], title="others")
    assert changes(base.to_json(), other.to_json()) == {"title": "others", "ys": [[7, 8]]}
    assert changes(base.to_json(), base.to_json()) == {}
    moved = chart([(2, 2), (3, 4)]).to_json()
    assert changes(base.to_json(), moved) == {"marks": moved["marks"]}


def test_what_a_chart_lacks_is_removed_by_its_changes():
    base, other = chart([(1, 2)], y_label="ms"), chart([(1, 2)])
    assert changes(base.to_json(), other.to_json()) == {"yLabel": None}


def test_numbers_are_short_and_defaults_left_out():
    content = chart([(1.0, 1 / 3), (2.0, 12345678.0)]).to_json()
    (line,) = content["marks"]
    assert json.dumps(line.pop("p")) == "[1, 0.333333, 2, 12345700]"
    assert line == {"k": "line", "c": "line arm0", "a": "map"}
    assert not {"rows", "log", "zooms", "records"} & set(content)


def test_a_range_is_padded_even_if_it_is_empty():
    assert padded_range([0.0, 10.0], 0.1) == (-1.0, 11.0)
    assert padded_range([5.0, 5.0], 0.1) == (4.5, 5.5)
    assert padded_range([0.0]) == (-1.0, 1.0)
