"""Names beside points: on the side with more room, stacked where points lie together."""

from itertools import pairwise

import pytest

from labkit.analysis.document.chart import Chart, Line, Text
from labkit.analysis.document.svg_chart_renderer import BOTTOM, LINE_HEIGHT, TOP, add_point_labels


def placed(*labels, height=300):
    chart = Chart("c", (0.0, 10.0), (0.0, 10.0), "x", "y", height=height)
    add_point_labels(chart, labels)
    return [mark for mark in chart.marks if isinstance(mark, Text)]


def leaders(*labels):
    chart = Chart("c", (0.0, 10.0), (0.0, 10.0), "x", "y", height=300)
    add_point_labels(chart, labels)
    return [mark.points for mark in chart.marks if isinstance(mark, Line)]


def test_a_line_leads_to_a_name_that_is_not_next_to_its_point():
    assert leaders(*((1.0, 5.0, "abc") for _ in range(3))) == []
    ((start, end),) = leaders(*((1.0, 5.0, "abc") for _ in range(4)))
    assert start == (1.0, 5.0) and end[0] == 1.0 and end[1] > 6.0


def test_a_name_stands_above_its_point_on_the_side_with_more_room():
    left, right = placed((1.0, 5.0, "a"), (9.0, 5.0, "b"))
    assert (left.x, left.y, left.text, left.anchor) == (1.0, 5.0, "a", "start")
    assert (right.x, right.y, right.text, right.anchor) == (9.0, 5.0, "b", "end")
    assert left.dx == -right.dx > 0 and left.dy == right.dy < 0


@pytest.mark.parametrize("x", [1.0, 9.0])
def test_the_names_of_points_that_lie_together_do_not_cover_each_other(x):
    labels = placed(*((x, 5.0, f"w4a8kv{bits}") for bits in range(6)))
    heights = sorted(label.dy for label in labels)
    gaps = [b - a for a, b in pairwise(heights)]
    assert gaps == [LINE_HEIGHT] * 5
    assert labels[0].dy > labels[1].dy  # upwards first


def test_names_far_apart_are_not_moved():
    for second in ((1.0, 2.0), (6.0, 5.0)):
        one, other = placed((1.0, 5.0, "abc"), (*second, "abc"))
        assert one.dy == other.dy


def test_a_name_of_a_point_at_the_edge_stays_within_the_panel():
    panel = 300 - TOP - BOTTOM
    for y in (0.0, 10.0):
        for label in placed(*((1.0, y, "name") for _ in range(4))):
            baseline = panel * (1 - y / 10) + label.dy
            assert LINE_HEIGHT - 4 <= baseline <= panel


def test_a_name_without_a_free_place_is_drawn_all_the_same():
    labels = placed(*((1.0, 5.0, "name") for _ in range(9)), height=TOP + BOTTOM + 60)
    assert len(labels) == 9
    assert len({label.dy for label in labels[:4]}) > 1 and labels[-1].dy == labels[0].dy
