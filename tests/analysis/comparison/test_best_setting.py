"""The best setting of a sweep, where a setting's value is 0 or below."""

from types import SimpleNamespace

import pytest

from labkit.analysis.comparison.arm_comparison import DecisionCriteria
from labkit.analysis.comparison.best_setting import best_settings, is_decided
from labkit.analysis.comparison.observations import MetricRow, RunValue

WASTE, LEFT = ("kv_waste_pct", "%", "lower"), ("left_pct", "% of RAM", "higher")
GOODPUT = ("goodput_req_s", "req/s", "higher")
MEASURED = ("preemptions", "requests", "lower")


def best_of(metric, blocks=8, noise=0.0, dropped=(), **values):
    """Return the best setting of arms ``one`` (the baseline), ``two``, ... with these values."""
    row = MetricRow("all", *metric, primary=True)
    for arm, value in values.items():
        row.arms[arm] = [
            RunValue(block, 0, f"runs/{block}", value * (1 + noise * (block % 3 - 1)))
            for block in range(blocks)
        ]
    baseline, *others = values
    data = SimpleNamespace(
        baseline=baseline, treatment_arms=others, dropped=dict.fromkeys(dropped, 4),
        criteria=DecisionCriteria(1, 0.05, 2.0),
    )  # fmt: skip
    (best,) = best_settings(SimpleNamespace(rows=[row], data=data, causes=lambda *_: []))
    return best


@pytest.mark.parametrize("blocks", [1, 8])
def test_the_best_of_computed_values_may_be_0(blocks):
    """It had no answer, because no value could be divided by it."""
    best = best_of(WASTE, blocks, one=0.0, two=12.0, three=30.0)
    assert (best.best, best.reference, best.excluded, best.withheld) == ("one", "two", {}, None)
    assert best.values == {"one": 0.0, "two": 12.0, "three": 30.0} and best.effect_pct == -100
    assert best.is_computed and is_decided([best])
    best = best_of(WASTE, blocks, one=30.0, two=0.0, three=0.0)
    assert best.possibly_best == ("two", "three") and best.reference == "one" and best.is_decided
    best = best_of(LEFT, blocks, one=-5.0, two=30.0, three=20.0)
    assert (best.best, best.reference, best.effect_pct) == ("two", "one", None)
    best = best_of(LEFT, blocks, one=20.0, two=20.0)
    assert best.possibly_best == ("one", "two") and best.reference == "two"


def test_a_measured_0_leaves_out_its_own_setting_only_where_it_cannot_be_the_best():
    best = best_of(GOODPUT, noise=0.01, one=4.0, two=8.0, three=0.0)
    assert best.excluded == {"three": "a value is not above 0"} and best.best == "two"
    assert not best.is_computed and best.is_decided
    best = best_of(MEASURED, noise=0.01, one=4.0, two=8.0, three=0.0)
    assert best.best is None and best.excluded == {
        "one": "a value of three is not above 0", "two": "a value of three is not above 0",
        "three": "a value is not above 0",
    }  # fmt: skip
