"""The objective of a cell, by which a sweeper chooses its next trial."""

import math
from types import SimpleNamespace

import pytest

from labkit.analysis.comparison.observations import MetricRow, RunValue
from labkit.analysis.studies.study_analysis import objective


def row(case, metric, primary, **arms):
    values = {
        arm: [RunValue(block, 0, "f", value) for block, value in enumerate(runs)]
        for arm, runs in arms.items()
    }
    return MetricRow(case, metric, "us", "lower", primary, arms=values)


def cell(rows, treatment_arms=(), effects=(), invalid=()):
    data = SimpleNamespace(baseline="base", treatment_arms=list(treatment_arms))
    comparisons = [
        {
            arm: SimpleNamespace(effect_pct=effect)
            for arm, effect in zip(treatment_arms, one, strict=False)
        }
        for one in effects
    ]
    causes = lambda arm, row: ["outputs differ"] * (arm in invalid)  # noqa: E731
    return SimpleNamespace(rows=rows, data=data, comparisons=comparisons, causes=causes)


def test_without_arms_it_is_the_baseline_s_median_of_the_first_primary_metric():
    rows = [
        row("a", "steps", False, base=[9.0]),
        row("a", "us", True, base=[1.0, 2.0, 50.0]),
        row("a", "tok_s", True, base=[7.0]),
        row("b", "us", True, base=[8.0]),
    ]
    assert objective(cell(rows)) == pytest.approx(math.sqrt(2.0 * 8.0))


def test_with_arms_it_is_the_first_arm_s_effect():
    rows = [row("a", "us", True), row("b", "us", True)]
    effects = [(21.0, 300.0), (0.0, 300.0)]
    assert objective(cell(rows, ("arm", "other"), effects)) == pytest.approx(10.0)


@pytest.mark.parametrize(
    "broken",
    [
        cell([]),
        cell([row("a", "us", True, base=[])]),
        cell([row("a", "us", True, base=[0.0])]),
        cell([row("a", "us", True)], ("arm",), [(None,)]),
        cell([row("a", "us", True, base=[1.0])], invalid=["base"]),
        cell([row("a", "us", True)], ("arm",), [(2.0,)], invalid=["arm"]),
    ],
)
def test_there_is_none_where_nothing_was_measured_or_a_gate_failed(broken):
    assert objective(broken) is None
