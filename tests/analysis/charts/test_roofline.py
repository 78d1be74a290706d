"""The roof of the roofline picture, and the rates of its points."""

from __future__ import annotations

from dataclasses import replace
from math import log10
from types import SimpleNamespace

import pytest
from planted_cells import planted_cell

from labkit.analysis.charts import roofline
from labkit.analysis.charts.roofline import RooflineLimits, RooflinePoint
from labkit.analysis.document.chart import Dots, Line, Text

LIMITS = RooflineLimits(read_gb_s=10.0, sgemm_gflop_s=50.0, threads=2, read_bytes=1 << 26)


def point(flops, seconds=1e-3, limits=LIMITS):
    return RooflinePoint("case", "arm", 1_000_000, flops, seconds, limits)


def chart(points):
    """Return the chart, its marks' positions, and its texts: (text, x, y, to the right)."""
    arms = [{"name": arm, "role": "arm"} for arm in dict.fromkeys(p.arm for p in points)]
    made = roofline.roofline_chart(planted_cell(arms=arms), points)
    dots = [at for mark in made.marks if isinstance(mark, Dots) for at in mark.points]
    texts = [(m.text, m.x, m.y, m.anchor == "start") for m in made.marks if isinstance(m, Text)]
    return made, dots, texts


def test_the_roof_spans_the_panel_and_turns_where_both_limits_meet():
    made, dots, _ = chart([point(1_000_000)])
    padded = roofline.PADDING_DECADES  # log of the lowest intensity, 1, is 0
    assert made.x == (-padded, 1.0) and made.y == (-padded, 2.0)
    (roof,) = [mark for mark in made.marks if isinstance(mark, Line)]
    at = [x for corner in roof.points for x in corner]
    assert at == pytest.approx([-padded, 1 - padded, log10(5), log10(50), 1, log10(50)])
    assert dots == [(0.0, 0.0)]
    bare, _, _ = chart([point(1_000_000, limits=None), point(999_000_000, limits=None)])
    assert not [mark for mark in bare.marks if isinstance(mark, Line)]
    assert bare.x == bare.y == (-padded, log10(999) + padded)


@pytest.mark.parametrize(
    ("flops", "bound", "share"), [(1_000_000, "memory", 0.1), (100_000_000, "compute", 2.0)]
)
def test_a_case_is_bound_by_the_limit_that_needs_more_time(flops, bound, share):
    assert point(flops).bound == bound and point(flops).share == pytest.approx(share)


def record(ok=True, limits=None, cases=(), arm="base"):
    notes = [SimpleNamespace(case=name, known_notes=note) for name, note in cases]
    run_notes = {"limits": limits} if limits else {}
    return SimpleNamespace(ok=ok, known_notes=run_notes, cases=notes, arm=arm)


def test_points_are_the_cases_whose_work_is_known_and_limits_the_best_of_a_run_that_worked():
    work = {"flops": 6_000_000, "least_bytes": 2_000_000}
    cases = [("a", work), ("b", {**work, "flops": 0}), ("c", {**work, "least_bytes": None})]
    times = {"base": {"median": 2000.0}, "arm": {"median": None}, "control": {"median": 1.0}}
    rows = [{"case": case, "metric": "dispatch_us", "arms": times} for case in "abc"]
    rows.append({"case": "a", "metric": "other", "arms": times})
    roles = {"base": "baseline", "arm": "arm", "control": "control"}
    cell = planted_cell(rows, arms=[{"name": n, "role": r} for n, r in roles.items()])
    low = {"read_gb_s": 1.0, "sgemm_gflop_s": 9.0, "threads": 2, "read_bytes": 1 << 20}
    high = {"read_gb_s": 2.0, "sgemm_gflop_s": 8.0, "threads": 4, "read_bytes": 3 << 20}
    failed = record(False, {key: 100 for key in low})
    (found,) = roofline.roofline_points(cell, [record(cases=cases), failed])
    assert (found.case, found.arm, found.limits) == ("a", "base", None)
    assert (found.intensity, found.bound, found.share) == (3.0, None, None)
    assert (found.gb_s, found.gflop_s) == (1.0, 3.0)  # in 2 ms
    records = [record(limits=low), record(cases=cases), record(limits=high), failed]
    (found,) = roofline.roofline_points(cell, records)
    assert found.limits == RooflineLimits(2.0, 9.0, 4, 3 << 20)
    assert found.limits.text().startswith(
        "Limits: 2.0 GB/s reading 3 MiB, 9.0 GFLOP/s in a float32"
    )


def test_arms_that_do_other_work_have_intensities_of_their_own():
    """All had that of the last record: of arms that read 2 and 4 MB, both 4."""
    arms = {"base": 2_000_000, "arm": 4_000_000}
    records = [
        record(cases=[("a", {"flops": 8_000_000, "least_bytes": size})], arm=arm)
        for arm, size in arms.items()
    ]
    times = {arm: {"median": 1000.0} for arm in (*arms, "other")}  # whose work is not known
    rows = [{"case": "a", "metric": "dispatch_us", "arms": times}]
    cell = planted_cell(rows, arms=[{"name": arm, "role": "arm"} for arm in times])
    found = roofline.roofline_points(cell, records)
    assert [(one.arm, one.intensity) for one in found] == [("base", 4.0), ("arm", 2.0)]


def test_the_arms_of_a_case_stand_side_by_side_and_its_number_beside_them():
    points = [
        RooflinePoint(case, arm, 1000, flops, 1e-6, None)
        for case, flops in (("a", 1000), ("b", 10_000))
        for arm in ("x", "y")
    ]
    made, dots, texts = chart(points)
    width, low = made.x[1] - made.x[0], -roofline.PADDING_DECADES
    assert made.x == made.y == (low, 1 - low)
    step = roofline.MARK_SPACING * width
    expected = {(at + side * step / 2, at) for at in (0, 1) for side in (-1, 1)}
    assert sorted(dots) == [pytest.approx(at) for at in sorted(expected)]
    assert [(text, right) for text, _, _, right in texts] == [("1", True), ("2", True)]
    assert texts[0][1:3] == pytest.approx((1.5 * step, 0))
    assert texts[1][1:3] == pytest.approx((1 + 1.5 * step, 1))
    legend = "Cases: 1 a; 2 b; arms of a case have the same intensity and are drawn side by side"
    assert roofline.cases_line(points) == legend
    assert roofline.cases_line(points[::2]) == "Cases: 1 a; 2 b"
    points[0] = replace(points[0], bytes=500)
    assert roofline.cases_line(points).endswith("; arms of a case are drawn side by side")


def test_numbers_cover_neither_marks_nor_each_other():
    points = [RooflinePoint(str(i), "x", 1000, 1000 + i, 1e-6, None) for i in range(12)]
    made, dots, texts = chart(points)

    def share(at, axis):
        return (at - axis[0]) / (axis[1] - axis[0])

    labels = [
        (share(x, made.x) + (1 if right else -1) * roofline.LABEL_WIDTH / 2, share(y, made.y))
        for _, x, y, right in texts
    ]
    assert {right for *_, right in texts} == {True, False}
    places = [(share(x, made.x), share(y, made.y)) for x, y in dots]
    for index, (x, y) in enumerate(labels):
        for other, below in [*places, *labels[:index]]:
            away = roofline.LABEL_HEIGHT * (1 - 1e-9)
            assert abs(x - other) >= roofline.LABEL_WIDTH or abs(y - below) >= away
    many = [RooflinePoint(str(i), "x", 1000, 1000, 1e-6, None) for i in range(61)]
    assert chart(many)[2] == [] and len(chart(many[:60])[2]) == 60
    assert roofline.cases_line(many) == "Cases: 61; the tooltips of the marks name them"
    assert roofline.cases_line(many[:60]).startswith("Cases: 1 0; 2 1;")
