"""Latency against throughput: curves, knees, and their table, chart and figure."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planted_cells import planted_cell

from labkit.analysis.charts.latency_throughput_chart import (
    latency_throughput_chart,
    latency_throughput_table,
)
from labkit.analysis.document.chart import Dots, Line, Text
from labkit.analysis.document.svg_chart_renderer import NUM_STYLES, chart_svg
from labkit.analysis.pages.markdown_report import markdown_table
from labkit.analysis.pages.matplotlib_figures import chart_figure
from labkit.analysis.pages.study_overview import MachineOverview
from labkit.analysis.studies.cell_summary import cell_labels
from labkit.analysis.studies.increasing_load import LOAD_OPTIONS, METRICS, arm_loads, load_curves
from labkit.records import Arm, CaseRecord


def cell(load, served, latency, by="rate", overrides=(), units=None, records=(), **config):
    workload = {"name": "w", "arrivals": {"kind": "poisson", "rate": None}, "concurrency": None}
    if by == "rate":
        workload["arrivals"]["rate"] = load
    else:
        workload["concurrency"] = load
    arms = [Arm("base", "baseline", {}, {"workload": workload, **config})]
    values = {"request_s": served, "e2e_p50_ms": latency}
    rows = [{"metric": m, "arms": {"base": {"median": values.get(m, 5.0)}}} for m in METRICS]
    option = {"rate": "workload.arrivals.rate", "clients": "workload.concurrency"}[by]
    data = SimpleNamespace(arms=arms, records=records, design=SimpleNamespace(units=units))
    analysis = SimpleNamespace(cell=planted_cell(rows), data=data)
    listed, folder = [f"{option}={load}", *overrides], f"load={load}"
    return SimpleNamespace(
        loads=list(arm_loads(analysis)), overrides=listed, entry=SimpleNamespace(dir=folder)
    )


def curves_of(study):
    return load_curves(study, cell_labels(study, LOAD_OPTIONS))


@pytest.mark.parametrize("by", ["rate", "clients"])
def test_the_knee_is_the_load_with_the_greatest_power(by):
    study = [cell(8, 4.2, 2000.0, by), cell(1, 1.0, 500.0, by), cell(4, 3.8, 700.0, by)]
    (curve,) = curves_of(study)
    assert [load.size for load in curve.loads] == [1, 4, 8]
    assert [load.power for load in curve.loads] == pytest.approx([2.0, 3.8 / 0.7, 2.1])
    assert curve.knee.size == 4
    table = latency_throughput_table([curve])
    lines = markdown_table(table).split("\n")[2:]
    assert ["knee" in line for line in lines] == [False, True, False]
    svg = chart_svg(latency_throughput_chart([curve]))
    assert svg.count("<circle") == 3 and "base: knee" in svg


def test_curves_of_one_arm_are_named_by_what_else_differs():
    study = [
        cell(load, load, 500.0, overrides=[f"workload={name}"], workload_name=name)
        for load in (1, 2, 4) for name in ("chat", "agent")
    ]  # fmt: skip
    names = ["base, workload=chat", "base, workload=agent"]
    curves = curves_of(study)
    assert [curve.name for curve in curves] == names
    (part,) = MachineOverview(None, None, curves, "stem").charts
    (legend,) = chart_figure([part]).legends  # the marks were called "base", beside both lines
    assert [text.get_text() for text in legend.get_texts()] == names
    assert [curve.name for curve in curves_of(study[::2])] == ["base"]


def test_knees_that_lie_together_are_named_one_above_the_other():
    study = [cell(8, 4.2, 2000.0), cell(1, 1.0, 500.0), cell(4, 3.8, 700.0)]
    (curve,) = curves_of(study)
    chart = latency_throughput_chart([curve, replace(curve, name="other")])
    one, other = (mark for mark in chart.marks if isinstance(mark, Text))
    assert (one.text, other.text) == ("base: knee", "other: knee")
    assert (one.x, one.y) == (3.8, 700.0) and one.dy != other.dy


def test_a_curve_without_a_knee_is_named_at_its_largest_load():
    """It had neither label nor legend; power still grows, so no knee is marked."""
    (curve,) = curves_of([cell(n, n, 500.0) for n in (1, 2, 4)])
    chart = latency_throughput_chart([curve])
    (label,) = (mark for mark in chart.marks if isinstance(mark, Text))
    assert (label.x, label.y, label.text) == (4, 500.0, "base")
    assert curve.knee is None and "knee" not in chart_svg(chart)


def test_no_two_of_many_curves_look_alike_and_each_is_in_the_legend():
    (curve,) = curves_of([cell(n, n, 500.0) for n in (1, 2, 4)])
    curves = [replace(curve, arm=str(i), name=str(i)) for i in range(NUM_STYLES)]
    chart = latency_throughput_chart(curves)
    dots = [(mark.style.split()[0], mark.mark) for mark in chart.marks if isinstance(mark, Dots)]
    lines = [mark.style for mark in chart.marks if isinstance(mark, Line) and mark.arm]
    assert len(set(dots)) == len(set(lines)) == NUM_STYLES
    overview = MachineOverview(None, None, curves, "stem")
    assert overview.charts[0].keys == tuple((str(i), s, "line") for i, s in enumerate(lines))


def test_loads_that_served_other_requests_say_so():
    study = [cell(n, n, 500.0, units=units) for n, units in ((8, 64), (1, 32), (4, 64))]
    note = "a run had 32, 64, 64 (in the order of the loads)"
    assert note in " ".join(latency_throughput_table(curves_of(study)).notes)
    assert note in MachineOverview(None, None, curves_of(study), "stem").charts[0].caption
    equal = [cell(n, n, 500.0, units=64) for n in (1, 4, 8)]
    assert len(latency_throughput_table(curves_of(equal)).notes) == 1


def test_a_load_of_sessions_is_named_so():
    traffic = CaseRecord("all", notes={"traffic": {"asked_unit": "sessions/s"}})
    records = [SimpleNamespace(arm="base", cases=[traffic])]
    study = [cell(n, 4.0 * n, 500.0, records=records) for n in (1, 2, 4)]
    lines = latency_throughput_table(curves_of(study)).lines
    assert [f"{load.size} {curve.by}" for curve, load in lines] == [
        "1.0 sessions/s", "2.0 sessions/s", "4.0 sessions/s",
    ]  # fmt: skip
    clients = [cell(n, n, 500.0, "clients", records=records) for n in (1, 2, 4)]
    assert [curve.by for curve in curves_of(clients)] == ["clients"]


def test_a_load_of_one_request_of_each_session_is_in_the_curve_of_sessions():
    units = {1: "requests/s", 2: "sessions/s", 4: "sessions/s"}
    study = []
    for rate, unit in units.items():
        traffic = CaseRecord("all", notes={"traffic": {"asked_unit": unit}})
        records = [SimpleNamespace(arm="base", cases=[traffic])]
        study.append(cell(rate, 4.0 * rate, 500.0, records=records))
    (curve,) = curves_of(study)
    assert (curve.by, [load.size for load in curve.loads]) == ("sessions/s", [1, 2, 4])


def test_cells_that_differ_in_more_than_their_load_are_no_curve():
    assert curves_of([cell(1, 1.0, 5.0), cell(2, 2.0, 5.0)]) == []
    assert curves_of([cell(n, 1.0, 5.0, seed=n) for n in (1, 2, 4)]) == []
    assert latency_throughput_table([]) is None
