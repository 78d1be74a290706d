"""The history of a metric: series from records alone, change points, and what splits a series."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from labkit.analysis.pages.history_page import HistoryPage, _chart, change_text
from labkit.analysis.studies.metric_history import (
    HistoryPoint,
    Series,
    _num_tested,
    metric_history,
)
from labkit.archive import archive_study
from labkit.history import main
from labkit.records import Metric

CASE = ("decode, 64 reqs, ctx 128",)


@pytest.fixture
def week(make_cell, tmp_path):
    """Return a function that writes a study of one day, and the folder of all studies."""

    def write(day, factor=1.0, probe=1.0, commit="a", metrics=None, **changes):
        def dated(record):
            time = f"2026-11-{day:02d}T10:00:{record.block:02d}Z"
            facts = {"git": commit * 40, "git_changes": "clean", **changes}
            before = {"matmul_us": 100.0 * probe}
            cases = tuple(replace(case, metrics=metrics or case.metrics) for case in record.cases)
            return replace(
                record,
                started=time,
                environment={**record.environment, **facts},
                probe={"before": before},
                cases=cases,
            )

        options = {"blocks": 2, "runs": 1, "cases": CASE, "effects": {}, "control": False}
        make_cell(f"outputs/{day:02d}/cell", seed=day, unit_scale=factor, change=dated, **options)
        return tmp_path / "outputs"

    return write


def test_a_slower_commit_is_found_and_named(week, capsys):
    for day in range(1, 13):
        root = week(day, 1.0 if day < 8 else 1.1, commit="a" if day < 8 else "b")
    (series,) = metric_history(root, "dispatch_us")
    (change,) = series.changes
    assert change.index == 7 and change.percent == pytest.approx(10, abs=1.5)
    assert change.probe_percent == pytest.approx(0)
    assert main([str(root), "dispatch_us"]) == 0
    out = capsys.readouterr().out
    assert (
        " more time per launch after a change between 2026-11-07 aaaaaaaaaa and 2026-11-08 "
        "bbbbbbbbbb" in out
    )
    assert "the machine's probe changed by 0.0%" in out.replace("+", "")
    page = (root / "history-dispatch_us.html").read_text("utf-8")
    assert page.count('class="dot"') == 12 and page.count('class="margin"') == 1
    assert page.count('<polyline class="median"') == 2 and "http" not in page.split("</style>")[1]
    table = (root / "history-dispatch_us.md").read_text("utf-8")
    assert table.count("| 2026-11-") == 12 and "[08](08)" in table
    assert main([str(root), "dispatch_us"]) == 0
    assert (root / "history-dispatch_us.html").read_text("utf-8") == page


def test_a_slower_machine_stands_beside_the_change(week):
    for day in range(1, 13):
        slow = 1.0 if day < 7 else 1.2
        root = week(day, slow, probe=slow)
    (change,) = metric_history(root, "dispatch_us")[0].changes
    assert change.probe_percent == pytest.approx(20, abs=0.1)


@pytest.mark.parametrize(
    ("metric", "unit", "before", "after", "how"),
    [
        ("goodput_req_s", "req/s", 0, 5, "serves 5.00 req/s more goodput"),
        ("goodput_req_s", "req/s", 5, 0, "serves 100 % fewer requests within the limits per"),
        ("left_pct", "% of RAM", -5, -10, "leaves 5.0 points less of the memory"),
        ("left_pct", "% of RAM", -5, 10, "leaves 15.0 points more of the memory"),
        ("left_pct", "% of RAM", 10, -5, "leaves 15.0 points less of the memory"),
        ("kv_waste_pct", "%", 0, 5, "wastes 5.0 points more of its KV memory"),
    ],
)
def test_a_change_from_or_to_0_or_less_names_its_direction(week, metric, unit, before, after, how):
    for day in range(1, 13):
        value = float(before if day < 7 else after)
        root = week(day, metrics=(Metric(metric, unit, "higher", True, (value,)),))
    (series,) = metric_history(root, metric)
    (change,) = series.changes
    assert change_text(series, change).startswith(f"{how} ")


def test_a_quiet_or_short_history_has_no_change(week):
    for day in range(1, 8):
        root = week(day, 1.0 if day < 4 else 2.0)
    (short,) = metric_history(root, "dispatch_us")
    assert not short.is_tested and short.changes == ()


def test_a_history_of_one_study_counts_one(week):
    root = week(1)
    page = HistoryPage(root, "dispatch_us", metric_history(root, "dispatch_us"))
    assert "<summary>1 study</summary>" in page.html()
    week(2)
    page = replace(page, series=metric_history(root, "dispatch_us"))
    assert "<summary>2 studies</summary>" in page.html()


def test_a_chart_s_numbers_are_in_the_unit_of_its_axis_and_its_median_is_one():
    """The axis said MiB and counted bytes; of four studies the line was at the third."""
    points = [
        HistoryPoint(Path("s"), f"2026-11-0{day}T10:00:00Z", "a", value, value, value, 2, None)
        for day, value in enumerate((4 << 20, 4 << 20, 5 << 20, 5 << 20), 1)
    ]
    series = Series("peak_kv_bytes", "c", "all", "a", "", "m", "bytes", "lower", tuple(points))
    svg = _chart(series)
    ticks = re.findall(r'text-anchor="end">([^<]+)<', svg)
    assert ticks and all(4 <= float(tick) <= 5 for tick in ticks) and ">MiB<" in svg
    heights = [float(y) for y in re.findall(r'cy="([0-9.]+)"', svg)]
    (middle,) = re.findall(r'class="median" points="[0-9.]+,([0-9.]+) ', svg)
    assert float(middle) == pytest.approx(sum(heights) / 4, abs=0.1)


def test_of_several_lines_as_many_are_tested_as_can_all_find_a_change(week):
    assert [_num_tested(lengths) for lengths in (
        [7], [8], [8, 8], [9, 8], [9, 9], [9, 9, 9], [12, 12, 9], []
    )] == [0, 1, 1, 1, 2, 3, 3, 0]  # fmt: skip
    for day in range(1, 10):
        root = week(day, 1.0 if day < 5 else 2.0)
    for day in range(1, 9):
        week(20 + day, cpu_model="other")
    long, short = metric_history(root, "dispatch_us")
    assert (len(long.points), len(short.points)) == (9, 8)
    assert long.is_tested and [change.index for change in long.changes] == [4]
    assert not short.is_tested
    page = HistoryPage(root, "dispatch_us", [long, short])
    assert "1 change in the 1 line with enough studies to find one" in page.summary
    assert page.markdown().count("Too few studies to find a change.") == 1
    assert HistoryPage(root, "ns/op", []).path == root / "history-ns-op.html"


def test_other_machines_and_options_are_other_series(week, make_cell):
    for day in range(1, 4):
        root = week(day)
    week(9, cpu_model="other")
    options = {"blocks": 2, "runs": 1, "cases": CASE, "effects": {}, "control": False}
    make_cell("outputs/20/cell", clients=4, **options)
    series = metric_history(root, "dispatch_us")
    assert [len(one.points) for one in series] == [3, 1, 1]
    assert {one.machine for one in series} == {"test, Linux, 2 cores", "other, Linux, 2 cores"}
    assert ", workload.concurrency=4" in {one.label for one in series}


def test_a_study_in_which_a_gate_failed_is_left_out_and_named(week, capsys):
    """Its time of double made a change."""
    for day in range(1, 9):
        root = week(day)
    for day in range(9, 13):
        week(day, 2.0, host="another than at the end")
    (series,) = metric_history(root, "dispatch_us")
    assert len(series.points) == 8 and series.is_tested and series.changes == ()
    assert [point.study.name for point in series.left_out] == ["09", "10", "11", "12"]
    assert main([str(root), "dispatch_us"]) == 0
    assert "from 8 studies (4 points left out, as a gate failed), 0 ch" in capsys.readouterr().out
    page = (root / "history-dispatch_us.md").read_text("utf-8")
    assert "4 points left out, as a gate failed: 09, 10, 11 and 1 more (the host changed)." in page
    told = [replace(point, cause="the output is </s>") for point in series.left_out]
    page = HistoryPage(root, "dispatch_us", [replace(series, left_out=tuple(told))])
    assert "(the output is \\</s>)" in page.markdown() and "is &lt;/s&gt;)" in page.html()
    for day in range(1, 9):
        shutil.rmtree(root / f"{day:02d}")
    assert main([str(root), "dispatch_us"]) == 0
    assert "1 line from 0 studies (4 points left" in capsys.readouterr().out


def test_every_arm_has_a_series_of_its_own_runs_and_the_control_none(make_cell, tmp_path):
    make_cell("outputs/01/cell", blocks=4, runs=1, cases=CASE, effects={"seq_map": 0.5})
    series = metric_history(tmp_path / "outputs", "dispatch_us")
    assert [one.name.split(",")[0] for one in series] == ["binary_search", "seq_map"]
    ((base,), (arm,)) = (one.points for one in series)
    assert (base.runs, arm.runs) == (4, 4)
    assert arm.value / base.value == pytest.approx(0.5, rel=0.05)


def test_archives_are_read_and_uncommitted_changes_marked(week, tmp_path):
    root = week(1, git_changes="0123456789abcdef")
    archive_study(root / "01", root / "packed.zip")
    ((point,),) = (one.points for one in metric_history(root, "dispatch_us"))
    assert point.study.name == "01"
    shutil.rmtree(root / "01")
    ((point,),) = (one.points for one in metric_history(root, "dispatch_us"))
    assert point.study.name == "packed.zip" and point.commit == "aaaaaaaaaa+" and point.runs == 2


def test_a_study_that_has_changed_since_its_archive_is_one_point(week):
    root = week(1)
    archive_study(root / "01", root / "01.zip")
    next((root / "01" / "cell" / "runs").glob("b01-*.json")).unlink()
    ((point,),) = (one.points for one in metric_history(root, "dispatch_us"))
    assert (point.study.name, point.runs) == ("01", 1)


def test_a_metric_that_no_study_has_names_the_nearest(week, capsys):
    root = week(1)
    assert main([str(root), "dispatch_su"]) == 2
    error = capsys.readouterr().err
    assert "no study has the metric 'dispatch_su'" in error and "dispatch_us" in error
    assert error.count("\n") == 1
    assert main([str(root / "none"), "dispatch_us"]) == 2
