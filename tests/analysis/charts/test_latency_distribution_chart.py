"""The distributions of latencies, with the limits of the workload."""

from types import SimpleNamespace

import numpy as np
import pytest
from planted_cells import planted_cell

from labkit.analysis.charts.latency_distribution_chart import latency_charts
from labkit.analysis.document.chart import Limit, Line
from labkit.records import Arm, CaseRecord


def analysis(latencies, outcomes=("ok", "ok"), limits=None):
    """Return an analysis whose arms have two runs each; ``latencies``: ms, by arm [run][request].

    Each value is a request's time to the last token; its time to the first token is a tenth.
    """
    config = {"workload": {"limits": limits or {}}}
    roles = ["baseline", *["arm"] * (len(latencies) - 1)]
    arms = [Arm(name, role, {}, config) for name, role in zip(latencies, roles, strict=True)]
    records = []
    for arm, runs in latencies.items():
        for outcome, run in zip(outcomes, runs, strict=True):
            requests = [{"e2e_ms": ms, "ttft_ms": ms / 10, "output_tokens": 10} for ms in run]
            case = CaseRecord("all", notes={"requests": requests})
            records.append(SimpleNamespace(arm=arm, outcome=outcome, cases=[case]))
    listed = [{"name": arm.name, "role": arm.role} for arm in arms]
    data = SimpleNamespace(arms=arms, records=records)
    return SimpleNamespace(cell=planted_cell(arms=listed), data=data)


def marks(chart, kind):
    return [mark for mark in chart.marks if isinstance(mark, kind)]


def test_a_line_has_each_percentile_of_an_arms_requests():
    values = np.arange(1001.0)
    runs = [list(values[::2]), list(values[1::2])]
    charts = {chart.link: (text, chart) for text, chart in latency_charts(analysis({"a": runs}))}
    assert list(charts) == ["ttft_ms", "tpot_ms", "e2e_ms"]
    text, chart = charts["e2e_ms"]
    (line,) = marks(chart, Line)
    x, y = np.array(line.points).T
    assert y == pytest.approx(np.arange(101))
    assert x[:100] == pytest.approx(10 * np.arange(100))
    assert x[100] == chart.x[1] == 995.0  # the slowest 0.5 % are cut off
    assert text.startswith("time to the last token: 101 quantiles of 1,001 values of all runs;")
    x, y = np.array(marks(charts["tpot_ms"][1], Line)[0].points).T
    assert x[50] == pytest.approx((500 - 50) / 9)


def test_runs_that_failed_are_left_out():
    charts = latency_charts(analysis({"a": [[100.0] * 3, [900.0] * 3]}, ("ok", "failed")))
    assert {chart.x[1] for _, chart in charts} == {10.0, 100.0}


def test_limits_are_drawn_once_and_within_the_axis():
    both = analysis({"a": [[50.0], [60.0]], "b": [[70.0], [80.0]]}, limits={"e2e_ms": 200})
    charts = {chart.link: chart for _, chart in latency_charts(both)}
    (limit,) = marks(charts["e2e_ms"], Limit)
    assert limit == Limit(200.0, "limit 200 ms")
    assert charts["e2e_ms"].x == (0.0, pytest.approx(220.0))
    assert marks(charts["ttft_ms"], Limit) == []
    assert [line.arm for line in marks(charts["ttft_ms"], Line)] == ["a", "b"]
