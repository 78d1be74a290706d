"""Charts of the HTML report: runs, drift, and differences by block."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from planted_cells import planted_cell

from labkit.analysis.charts import run_and_effect_charts
from labkit.analysis.charts.run_and_effect_charts import (
    drift_chart,
    effects_chart,
    pairs_chart,
    runs_chart,
)
from labkit.analysis.document.chart import Band, Dots, Line


def marks(chart, kind):
    return [mark for mark in chart.marks if isinstance(mark, kind)]


ROLES = {"a": "baseline", "b": "arm", "control": "control"}
ORDER = [["a", "b", "control"], ["b", "control", "a"]]
POSITIONS = {f"runs/b{b:02d}-p{p:02d}-{arm}.json": 3 * b + p + 1
             for b, arms in enumerate(ORDER) for p, arm in enumerate(arms)}  # fmt: skip


def ordered_row(**values):
    """Return a row of a cell of two blocks, with these values (B) of each arm by block."""
    files = {(int(f[6:8]), f[13:-5]): f for f in POSITIONS}
    arms = {
        arm: {
            "n": len(values.get(arm, ())),
            "median": float(np.median(values[arm])) if values.get(arm) else None,
            "runs": [
                {"file": files[block, arm], "value": value}
                for block, value in enumerate(values.get(arm, ()))
            ],
        }
        for arm in ROLES
    }
    none = dict.fromkeys(("effect_pct", "ci_low_pct", "ci_high_pct"))
    effect = {"effect_pct": 5.0, "ci_low_pct": 2.0, "ci_high_pct": 9.0}
    return {"case": "all", "metric": "kv", "unit": "bytes", "primary": True, "arms": arms,
            "comparisons": [{"arm": "b", **effect}, {"arm": "control", **none}]}  # fmt: skip


def ordered_cell(*rows, **values):
    """Return a cell of two blocks with these rows, or one row with these values."""
    design = {"order": ORDER, "runs_per_block": 1, "margin_pct": 2.0}
    listed = [{"name": name, "role": role} for name, role in ROLES.items()]
    return planted_cell(rows or [ordered_row(**values)], arms=listed, design=design)


def test_runs_are_drawn_in_their_order_with_each_arm_s_median():
    cell = ordered_cell(a=[1 << 20, 3 << 20], b=[4 << 20, 8 << 20])
    chart = runs_chart(cell, cell.rows[0], "cell/")
    assert (chart.x, chart.y_label, chart.link) == ((0.5, 6.5), "kv (MiB)", "run")
    assert chart.y == (pytest.approx(1 - 0.42), pytest.approx(8 + 0.42))
    assert marks(chart, Band) == [Band(3.5, 6.5, "block")]
    first, second = marks(chart, Dots)
    assert (first.arm, first.points) == ("a", ((1.0, 1.0), (6.0, 3.0)))
    assert (second.arm, second.points) == ("b", ((2.0, 4.0), (4.0, 8.0)))
    lines = [(line.arm, line.points) for line in marks(chart, Line)]
    assert lines == [("a", ((0.5, 2.0), (6.5, 2.0))), ("b", ((0.5, 6.0), (6.5, 6.0)))]
    assert chart.href(first, 1) == "cell/runs/b01-p02-a.json"
    none = ordered_cell()
    assert runs_chart(none, none.rows[0], "cell/") is None


def test_drift_is_the_mean_deviation_of_a_run_from_its_arms_medians():
    cell = ordered_cell(
        ordered_row(a=[100.0, 400.0], b=[200.0, 200.0]),
        ordered_row(a=[100.0, 100.0]),
        ordered_row(a=[1.0, 9.0]) | {"primary": False},
    )
    files = [f[5:-5] for f in POSITIONS]
    records = [SimpleNamespace(run=f, block=int(f[1:3]), position=int(f[5:7])) for f in files]
    probe = {(0, 0): 1.0, (1, 2): 1.02, (1, 1): 1.01}  # of control, no run has a value
    data = SimpleNamespace(probe=probe, records=records)
    chart = drift_chart(SimpleNamespace(cell=cell, data=data))
    metric, probes = marks(chart, Line)
    low, high = 100 * math.log(100 / 250) / 2, 100 * math.log(400 / 250) / 2
    assert metric.arm == "runs" and dict(metric.points) == pytest.approx(
        {1.0: low, 2.0: 0.0, 4.0: 0.0, 6.0: high}
    )
    assert dict(probes.points) == pytest.approx({1.0: -1.0, 6.0: 1.0})
    assert chart.x == (0.5, 6.5) and chart.x_names[:3] == ("b00-p00-a", "b00-p01-b", "")
    assert chart.y_label == "from the arm's median (%)"
    quiet = SimpleNamespace(cell=ordered_cell(a=[1.0]), data=SimpleNamespace(probe={}, records=[]))
    assert drift_chart(quiet) is None
    two = SimpleNamespace(cell=ordered_cell(a=[1.0, 0.0]), data=quiet.data)
    assert drift_chart(two) is None  # a run without a positive value has no deviation


def test_a_slower_machine_moves_latency_and_throughput_the_same_way():
    """A throughput that fell by a tenth and a latency that rose by as much drew a flat line."""
    slower = [100.0, 110.0], [100.0, 100.0 / 1.1]
    cell = ordered_cell(
        ordered_row(a=slower[0]) | {"better": "lower"},
        ordered_row(a=slower[1]) | {"better": "higher"},
    )
    chart = drift_chart(SimpleNamespace(cell=cell, data=SimpleNamespace(probe={}, records=[])))
    ((_, first), (_, last)) = marks(chart, Line)[0].points
    assert last - first == pytest.approx(100 * math.log(1.1))
    assert chart.y_label == "from the arm's median (%), up is worse"


@pytest.mark.parametrize("known", [True, False])
def test_differences_stand_by_block_and_their_estimate_at_the_right(monkeypatch, known):
    pairs = {"b": {0: 4.0, 1: 6.0}, "control": {1: -1.0}}
    monkeypatch.setattr(
        run_and_effect_charts, "paired_differences", lambda row, arm, base, runs: pairs.get(arm)
    )
    cell = ordered_cell(a=[1.0, 1.0])
    if not known:
        pairs.clear()
        assert pairs_chart(cell, cell.rows[0], None) is None
        return
    chart = pairs_chart(cell, cell.rows[0], None)
    assert (chart.x, chart.unit, chart.signed) == ((0.5, 3.9), "%", True)
    assert chart.y == (pytest.approx(-2 - 0.66), pytest.approx(9 + 0.66))
    assert chart.x_ticks == ((1.0, "0"), (2.0, "1"), (3.15, "all"))
    assert chart.x_names == ("block 0", "block 1", "all blocks")
    assert marks(chart, Band) == [Band(-2.0, 2.0, "margin", across=True)]
    zero, interval = marks(chart, Line)
    assert zero.points == ((0.5, 0.0), (3.9, 0.0))
    at = 3.15 - 0.125
    assert interval.points == ((at, 2.0), (at, 9.0)) and interval.arm == "b"
    dots = [(one.arm, one.points) for one in marks(chart, Dots)]
    assert dots == [
        ("b", ((pytest.approx(0.94), 4.0), (pytest.approx(1.94), 6.0))),
        ("control", ((pytest.approx(2.06), -1.0),)),
        ("b", ((at, 5.0),)),
    ]


def test_a_long_study_has_a_tick_at_some_blocks(monkeypatch):
    monkeypatch.setattr(run_and_effect_charts, "paired_differences", lambda *arguments: {25: 1.0})
    cell = ordered_cell(a=[1.0, 1.0])
    chart = pairs_chart(cell, cell.rows[0], None)
    assert chart.x == (0.5, 27.9)
    assert [label for _, label in chart.x_ticks] == [*map(str, range(0, 26, 3)), "all"]


def test_an_effect_that_rounds_to_0_has_no_sign():
    row = ordered_row(b=[1.0, 1.0])
    effect = {"effect_pct": -0.001, "ci_low_pct": -1.0, "ci_high_pct": 1.0, "verdict": "equivalent"}
    row["comparisons"] = [{"arm": "b", **effect}]
    (mark,) = marks(effects_chart(ordered_cell(row)), Dots)
    assert mark.tips == ("kv, b: 0.00%, equivalent",)
