"""The roof of the roofline picture, and the rates of its points."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from planted_cells import planted_cell

from labkit.analysis.charts import roofline
from labkit.analysis.charts.roofline import RooflineLimits, RooflinePoint

LIMITS = RooflineLimits(read_gb_s=10.0, sgemm_gflop_s=50.0, threads=2, read_bytes=1 << 26)


def point(flops, seconds=1e-3, limits=LIMITS):
    return RooflinePoint("case", "arm", 1_000_000, flops, seconds, limits)


def test_the_roof_spans_the_panel_and_turns_where_both_limits_meet():
    roof = roofline._roof([point(1_000_000)], (0, 2))
    assert roof == [(1.0, 10.0), (5.0, 50.0), (100.0, 50.0)]
    assert roofline._roof([point(1_000_000, limits=None)], (0, 2)) == []


def test_the_ranges_contain_the_points_and_the_corner():
    x, y = roofline._axis_ranges([point(1_000_000)])
    assert x[0] < 0 and x[1] >= 1  # the corner is at 5 FLOPs per byte
    assert y[0] <= 0 and y[1] >= 2  # 1 GFLOP/s, and the limit of 50


@pytest.mark.parametrize(
    ("flops", "bound", "share"), [(1_000_000, "memory", 0.1), (100_000_000, "compute", 2.0)]
)
def test_a_case_is_bound_by_the_limit_that_needs_more_time(flops, bound, share):
    assert point(flops).bound == bound and point(flops).share == pytest.approx(share)


def record(ok=True, limits=None, cases=()):
    notes = [SimpleNamespace(case=name, known_notes=note) for name, note in cases]
    run_notes = {"limits": limits} if limits else {}
    return SimpleNamespace(ok=ok, known_notes=run_notes, cases=notes)


def test_limits_are_the_best_of_any_run_that_worked():
    low = {"read_gb_s": 1.0, "sgemm_gflop_s": 9.0, "threads": 2, "read_bytes": 1 << 20}
    high = {"read_gb_s": 2.0, "sgemm_gflop_s": 8.0, "threads": 4, "read_bytes": 3 << 20}
    failed = {key: 100 for key in low}
    records = [record(limits=low), record(), record(limits=high), record(False, failed)]
    limits = roofline.best_limits(records)
    assert limits == RooflineLimits(2.0, 9.0, 4, 3 << 20)
    assert limits.text().startswith("Limits: 2.0 GB/s reading 3 MiB, 9.0 GFLOP/s in a float32")
    assert roofline.best_limits([record(), record(False, failed)]) is None


def test_points_are_the_cases_whose_work_is_known():
    work = {"flops": 6_000_000, "least_bytes": 2_000_000}
    cases = [("a", work), ("b", {**work, "flops": 0}), ("c", {**work, "least_bytes": None})]
    times = {"base": {"median": 2000.0}, "arm": {"median": None}, "control": {"median": 1.0}}
    rows = [{"case": case, "metric": "dispatch_us", "arms": times} for case in "abc"]
    rows.append({"case": "a", "metric": "other", "arms": times})
    roles = {"base": "baseline", "arm": "arm", "control": "control"}
    cell = planted_cell(rows, arms=[{"name": n, "role": r} for n, r in roles.items()])
    (found,) = roofline.roofline_points(cell, [record(cases=cases)])
    assert (found.case, found.arm, found.limits) == ("a", "base", None)
    assert (found.intensity, found.bound, found.share) == (3.0, None, None)
    assert (found.gb_s, found.gflop_s) == (1.0, 3.0)  # in 2 ms


def test_the_arms_of_a_case_stand_side_by_side_and_its_number_beside_them():
    points = [
        RooflinePoint(case, arm, 1000, flops, 1e-6, None)
        for case, flops in (("a", 1000), ("b", 10_000))
        for arm in ("x", "y")
    ]
    positions = roofline._mark_positions(points, (0, 2))
    step = roofline.MARK_SPACING * 2
    assert [at for at, _ in positions] == pytest.approx(
        [-step / 2, step / 2, 1 - step / 2, 1 + step / 2]
    )
    assert [y for _, y in positions] == pytest.approx([0, 0, 1, 1])  # 1 and 10 GFLOP/s
    first, second = roofline.case_labels(points, (0, 2), (0, 2))
    assert (first.text, first.right, second.text) == ("1", True, "2")
    assert first.x == pytest.approx(roofline.MARK_SPACING * 1.5) and first.y == 0
    assert second.x == pytest.approx(0.5 + roofline.MARK_SPACING * 1.5) and second.y == 0.5
    legend = "Cases: 1 a; 2 b; arms of a case have the same intensity and are drawn side by side"
    assert roofline.cases_line(points) == legend
    assert roofline.cases_line(points[::2]) == "Cases: 1 a; 2 b"


def test_numbers_cover_neither_marks_nor_each_other():
    points = [RooflinePoint(str(i), "x", 1000, 1000 + i, 1e-6, None) for i in range(12)]
    labels = roofline.case_labels(points, (-1, 1), (-1, 1))
    assert {label.right for label in labels} == {True, False}
    for i, one in enumerate(labels):
        assert abs(one.middle - 0.5) >= roofline.LABEL_WIDTH or one.y < 0.5
        for other in labels[:i]:
            across, along = abs(one.middle - other.middle), abs(one.y - other.y)
            assert across >= roofline.LABEL_WIDTH or along >= roofline.LABEL_HEIGHT * (1 - 1e-9)
    left = next(label for label in labels if not label.right)
    assert left.middle == pytest.approx(left.x - roofline.LABEL_WIDTH / 2)
    many = [RooflinePoint(str(i), "x", 1000, 1000, 1e-6, None) for i in range(61)]
    assert roofline.case_labels(many, (-1, 1), (-1, 1)) == []
    assert roofline.cases_line(many) == "Cases: 61; the tooltips of the marks name them"
    assert roofline.cases_line(many[:60]).startswith("Cases: 1 0; 2 1;")
