"""The roof of the roofline picture, and the rates of its points."""

from __future__ import annotations

import pytest

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
