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
    data = SimpleNamespace(arms=arms, records=records, keeps_stalls=False)
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
    assert text == (
        "time to the last token: 101 quantiles of 1,001 values of all runs; the slowest (at most "
        "0.5 % of an arm's) are beyond the right edge"
    )
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


def test_a_tail_within_the_axis_is_drawn_where_it_is():
    """Up to a limit of 1,000 ms, the curve reached 100 % at 300 ms although a request took 900."""
    values = [300.0] * 999 + [900.0]
    tailed = analysis({"a": [values[::2], values[1::2]]}, limits={"e2e_ms": 1000})
    charts = {chart.link: (text, chart) for text, chart in latency_charts(tailed)}
    text, chart = charts["e2e_ms"]
    (line,) = marks(chart, Line)
    assert np.array(line.points[-2:]) == pytest.approx(np.array([[300.0, 99.0], [900.0, 100.0]]))
    assert text == "time to the last token: 101 quantiles of 1,000 values of all runs"
    text, chart = charts["ttft_ms"]
    assert chart.x[1] == 30.0 and "(at most 0.1 % of an arm's)" in text


@pytest.mark.parametrize(
    ("noted", "tpot"),
    [({}, 10.0), ({"first_chunk": 4}, 15.0), ({"untimed_tokens": 1}, 11.25),
     ({"first_chunk": 9, "untimed_tokens": 1}, None)],
)  # fmt: skip
def test_the_time_per_token_is_that_of_the_metric(noted, tpot):
    one = analysis({"a": [[100.0], [100.0]]})
    for record in one.data.records:
        (request,) = record.cases[0].notes["requests"]
        request |= noted
    charts = {chart.link: chart for _, chart in latency_charts(one)}
    drawn = [marks(charts["tpot_ms"], Line)[0].points[0][0]] if "tpot_ms" in charts else [None]
    assert drawn == [tpot]
